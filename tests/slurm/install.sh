#!/usr/bin/env bash
# Installs the distribution's SLURM for the tests where that is allowed: as root, with apt. Says so where it is not.
set -euo pipefail
packages=(slurmctld slurmd slurm-client munge iproute2)
missing=""
for program in slurmctld slurmd sbatch munged ip nsenter unshare; do command -v "$program" >/dev/null || missing+=" $program"; done
if [ -z "$missing" ]; then exit 0; fi
if [ "$(id -u)" != 0 ]; then
  echo "tests/slurm: not root, and$missing not installed, so SLURM is not there and its tests are skipped; as root: apt-get install ${packages[*]}"
elif ! command -v apt-get >/dev/null; then
  echo "tests/slurm: no apt-get, and$missing not installed, so SLURM is not there and its tests are skipped"
else
  log=$(mktemp)
  if { apt-get install -y --no-install-recommends "${packages[@]}" ||
    { apt-get update && apt-get install -y --no-install-recommends "${packages[@]}"; }; } >"$log" 2>&1 </dev/null; then
    echo "tests/slurm: installed ${packages[*]}"
  else
    echo "tests/slurm: cannot install ${packages[*]}, so their tests are skipped: $(tail -n 1 "$log")"
  fi
  rm -f "$log"
fi
