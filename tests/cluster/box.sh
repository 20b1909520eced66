#!/bin/bash
# Pid 1 of a cluster's box. cluster.py starts it in new mount, uts, ipc, net and pid namespaces:
#     box.sh ROOT STAGE HOME [--cover DIR]... [--expose SOURCE TARGET]...
# It gives the box a file system of its own, an overlay that leaves ROOT as it is, says "ready" and
# then lives until its standard input ends. That input is a pipe whose other end only the process
# that asked for the cluster holds: when that process ends, however it ends, the pipe ends, this
# script ends, and the kernel takes everything in the box along.
set -euo pipefail
root=$1 stage=$2 home=$3
shift 3

mount -t tmpfs -o mode=755 cluster "$stage"
mkdir "$stage"/{upper,work,root}
new=$stage/root
mount -t overlay -o "lowerdir=$root,upperdir=$stage/upper,workdir=$stage/work" overlay "$new"

mkdir -p "$new"/{proc,sys,dev,run,tmp,home,var/tmp,var/lib/cluster}
mount -t proc proc "$new/proc"
mount -t sysfs sysfs "$new/sys"
mount -t tmpfs -o mode=755 run "$new/run"
mount -t tmpfs -o mode=1777 tmp "$new/tmp"
mount -t tmpfs -o mode=1777 tmp "$new/var/tmp"
mount -t tmpfs -o mode=755 nodes "$new/var/lib/cluster"
# The homes are on the disk, as a shared file system that is no tmpfs.
mount --bind "$home" "$new/home"

mount -t tmpfs -o mode=755 dev "$new/dev"
mkdir -m 755 "$new/dev/pts"
mkdir -m 1777 "$new/dev/shm"
# The caller's terminal has to be found by its name, so its pts are the box's too.
mount --bind /dev/pts "$new/dev/pts"
ln -s /proc/self/fd "$new/dev/fd"
for link in stdin:0 stdout:1 stderr:2; do ln -s "/proc/self/fd/${link#*:}" "$new/dev/${link%:*}"; done
mknod -m 666 "$new/dev/null" c 1 3
mknod -m 666 "$new/dev/zero" c 1 5
mknod -m 666 "$new/dev/full" c 1 7
mknod -m 666 "$new/dev/random" c 1 8
mknod -m 666 "$new/dev/urandom" c 1 9
mknod -m 666 "$new/dev/tty" c 5 0
mknod -m 666 "$new/dev/ptmx" c 5 2

# Python, the repository: read-only, since a root process in the box is root outside too. A second
# bind in /var/lib/cluster lets a node find them again under the directories that it covers.
mkdir "$new/var/lib/cluster/exposed"
count=0
while (($#)); do
    case $1 in
    --cover)
        mount -t tmpfs -o mode=755 covered "$new$2"
        shift 2
        ;;
    --expose)
        held=$new/var/lib/cluster/exposed/$((count += 1))
        mkdir -p "$held/at" "$new$3"
        mount --bind "$2" "$held/at"
        mount -o remount,bind,ro "$held/at"
        mount --bind "$held/at" "$new$3"
        printf '%s\n' "$3" >"$held/target"
        shift 3
        ;;
    esac
done

hostname login
cd "$new"
pivot_root . .
umount -l .
# A new bash from the new root: nothing of the box holds on to the old one.
exec chroot . /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin /bin/bash -c \
    'cd / && echo ready && exec >/dev/null && read -r _'
