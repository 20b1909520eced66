#!/bin/bash
# Pid 1 of a node, in its own net, uts, mount and pid namespaces: node.sh NAME ADDRESS HARDWARE DIRECTORY...
# It lays the node's own /proc, /sys, /dev and local disks over the box's and runs slurmd. Bash,
# not slurmd, is pid 1: it reaps what jobs leave, and slurmd changes its credentials at start,
# which would take from it the signal that ends it with its parent.
set -euo pipefail
name=$1 address=$2 hardware=$3
shift 3
own=/var/lib/cluster/$name

hostname "$name"
ip -batch - <<EOF
link set lo up
addr replace $address/24 dev eth0
link set eth0 up
EOF

mount -t proc proc /proc
mount --bind "$own/boot_id" /proc/sys/kernel/random/boot_id

# The sysfs of this net namespace, and over it the node's hardware. Whoever writes to the merged
# tree writes to the overlay's upper directory: never to the machine's real devices.
mount -t sysfs sysfs /sys
mount -t overlay -o "lowerdir=/var/lib/cluster/hardware/$hardware:/sys,upperdir=$own/sys,workdir=$own/sys.work" sys /sys
# slurmd 22.05 wants something there even if it uses no cgroups: a tmpfs is cgroup v1 to it.
if [ -d /sys/fs/cgroup ]; then
    mount -t tmpfs -o mode=755 cgroup /sys/fs/cgroup
fi

mount --bind /dev/pts "$own/dev/pts"
mount --rbind "$own/dev" /dev
for directory in "$@"; do
    mkdir -p "/$directory"
    mount --bind "$own/disk/$directory" "/$directory"
done
for exposed in /var/lib/cluster/exposed/*/; do
    target=$(<"$exposed/target")
    # Not mountpoint: it takes the box's own mount for this one, which a local disk may lie over.
    [ "$target" -ef "$exposed/at" ] || { mkdir -p "$target" && mount --bind "$exposed/at" "$target"; }
done

slurmd -D >>/var/log/slurm/slurmd.out 2>&1 &
trap 'kill -TERM $!' TERM
# A trapped signal ends the first wait before slurmd has ended.
wait $! || wait $!
