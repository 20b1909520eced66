#!/bin/bash
# Installs the packages that a virtual cluster needs, where one is missing. Quiet if all is well.
set -euo pipefail
packages=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2 util-linux)

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

command -v dpkg-query >/dev/null ||
    fail "this knows Debian's packages only; needed are slurmctld, slurmd, Slurm's commands and" \
        "plugins, munge, iproute2 and util-linux"
missing=()
for package in "${packages[@]}"; do
    status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$status" = installed ] || missing+=("$package")
done
((${#missing[@]})) || exit 0
((EUID == 0)) || fail "installing ${missing[*]} needs root"

log=$(mktemp)
policy=/usr/sbin/policy-rc.d
made=
cleanup() { rm -f "$log" $made; }
trap cleanup EXIT
# The packages would start their daemons, which have no configuration here and are not wanted:
# every cluster starts its own.
if [ ! -e "$policy" ]; then
    made=$policy
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi

export DEBIAN_FRONTEND=noninteractive
install() { apt-get install -qq -y --no-install-recommends "${missing[@]}" >"$log" 2>&1; }
# The first try fails where the package lists are absent or too old.
install || { apt-get update -qq >"$log" 2>&1 && install; } || {
    cat "$log" >&2
    fail "could not install ${missing[*]}"
}
