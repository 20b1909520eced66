#!/bin/bash
# Makes a root for clusters with another version of Slurm: mkroot.sh SUITE DIRECTORY [MIRROR]
#     mkroot.sh trixie /var/tmp/trixie        Slurm 24.11
#     mkroot.sh forky /var/tmp/forky          Slurm 26.05
#     GPUSUB_CLUSTER_ROOT=/var/tmp/trixie python -m pytest tests/cluster
# Takes half a minute and 140 MB. Needs root, mmdebstrap and debian-archive-keyring. Clusters don't
# write to it. Python comes from this machine, unless it lies in /usr.
set -euo pipefail
if (($# < 2)); then
    sed -n '2,7s/^# //p' "$0" >&2
    exit 2
fi
suite=$1 directory=$2
shift 2 # what is left is the mirror, if one is named

# Suites that aren't released yet are now and then older than their own expiry date.
mmdebstrap --quiet --variant=minbase --mode=root \
    --keyring=/usr/share/keyrings/debian-archive-keyring.gpg \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Check-Valid-Until "false"' \
    --include=slurmctld,slurmd,slurm-client,slurm-wlm-basic-plugins,munge,iproute2,procps,libffi8 \
    "$suite" "$directory" "$@"
chroot "$directory" slurmctld -V
