#!/usr/bin/env bash
# How a job is doing:  slurm/status.sh JOB
set -euo pipefail
fail() { echo "error: $*" >&2; exit 2; }
[ $# = 1 ] && [[ $1 =~ ^[0-9]+$ ]] || fail "usage: slurm/status.sh JOB, the number that sbatch printed"

field() { sed -n "s/^$1=//p" <<<"$record" | head -n 1; }
record=$(scontrol -o show job "$1" 2>/dev/null | tr ' ' '\n') || true
[ -n "$record" ] || fail "job $1: SLURM does not know it (any more); its output file is where you submitted it"
echo "job $1: $(field JobState), $(field RunTime) of $(field TimeLimit), on $(field NodeList)"
squeue --noheader --steps --job "$1" --format '  %j %M on %N' | grep -vE '^  (batch|extern)' || true

output=$(scontrol show job "$1" | sed -n 's/^ *StdOut=//p')
[ -s "$output" ] || { echo "nothing in $output yet"; exit 0; }
logs=$(sed -n 's/.*; logs in //p' "$output" | tail -n 1)
[ -d "${logs:-}" ] || { tail -n 5 "$output"; exit 0; }
run=${logs%/logs/*}
echo "run folder: $run"
for log in "$logs"/controller-*.log; do [ ! -s "$log" ] || { echo "progress:"; tail -n 3 "$log" | sed 's/^/  /'; }; done
for log in "$logs"/rollout-*.log; do [ ! -s "$log" ] || sed -n "s/^/  /; \$p" "$log"; done
if [ -s "$run/evals.jsonl" ]; then echo "last evaluation: $(tail -n 1 "$run/evals.jsonl")"; fi
if [ "$(field JobState)" != RUNNING ]; then echo "last words:"; tail -n 5 "$output" | sed 's/^/  /'; fi
