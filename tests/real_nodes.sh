# Installs what tests over real nodes, under MPI, under Slurm and in a browser run, where nobody minds. Whatever comes of it, the exit
# status is 0.
PATH=$PATH:/usr/sbin:/sbin
lacking() {
    for pair in "$@"; do
        command -v "${pair%%:*}" >/dev/null || printf ' %s' "${pair#*:}"
    done
}
nodes=$(lacking ssh:openssh-client sshd:openssh-server ip:iproute2 nsenter:util-linux mpirun:openmpi-bin)
browser=$(lacking chromium:chromium chromedriver:chromium-driver) # by itself: some systems have no such packages
slurm=$(lacking slurmctld:slurm-wlm munged:munge)                       # likewise
missing=$nodes$browser$slurm
[ -n "$missing" ] || exit 0

leave() {
    echo "nodes: not installed:$missing ($1); the tests that need it skip"
    exit 0
}
[ "$(id -u)" = 0 ] || leave "that takes root"
command -v apt-get >/dev/null || leave "there is no apt-get"
# There the package would start a server that lets others in.
[ ! -d /run/systemd/system ] || leave "this machine starts the services that are installed; do it yourself"

log=$(mktemp)
policy=/usr/sbin/policy-rc.d
trap 'rm -f "$log" ${made:+"$policy"}' EXIT
if [ ! -e $policy ]; then
    made=yes
    printf '#!/bin/sh\nexit 101\n' >$policy # nothing is started
    chmod +x $policy
fi
echo "nodes: installing$missing"
export DEBIAN_FRONTEND=noninteractive
quick="-q -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 -o DPkg::Lock::Timeout=30"
timeout -k 5 60 apt-get $quick update >"$log" 2>&1 </dev/null
[ $? -ne 124 ] || leave "apt-get update: nothing came within a minute"
missing=
for wanted in "$nodes" "$browser" "$slurm"; do
    [ -z "$wanted" ] ||
        timeout -k 5 180 apt-get $quick install --yes --no-install-recommends $wanted >>"$log" 2>&1 </dev/null ||
        missing=$missing$wanted
done
[ -z "$missing" ] || leave "apt-get: $(grep -v '^$' "$log" | tail -n 1)"
