#!/usr/bin/env bash
# A newcomer's first job: the distributed tests on the site's own GPUs, over NCCL.
#
#   sbatch slurm/test_distributed.sh                       4 GPUs of one node
#   sbatch --nodes=2 slurm/test_distributed.sh             2 GPUs on each of two nodes: the network between them too
#SBATCH --job-name=a3po-test
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --mem=128G
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --no-requeue

: "${A3PO_HOME:=${SLURM_SUBMIT_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}}"
[ -r "$A3PO_HOME/slurm/lib.sh" ] || { echo "error: A3PO_HOME=$A3PO_HOME: no slurm/lib.sh there; submit from the repository" >&2; exit 2; }
: "${CHOOSE:=}"  # CHOOSE: pytest's -k, to run some of the tests
# shellcheck source=slurm/lib.sh
source "$A3PO_HOME/slurm/lib.sh"
set -euo pipefail

RANKS=4  # what most tests are made for
load_site
GPUS_PER_NODE=${SLURM_GPUS_PER_NODE:-$GPUS_PER_NODE} GPUS_PER_NODE=${GPUS_PER_NODE##*:} # what the job was given
[ -n "${SLURM_JOB_ID:-}" ] || fail "no SLURM job: submit with 'sbatch $0'"
mapfile -t ALL < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
((RANKS % ${#ALL[@]} == 0)) || fail "${#ALL[@]} nodes do not share $RANKS ranks evenly; use 1, 2 or 4"
LOGS=${RUN_DIR:=$A3PO_HOME/runs/$SLURM_JOB_NAME-$SLURM_JOB_ID}/logs
mkdir -p "$LOGS"
export PYTEST_DEBUG_TEMPROOT=$RUN_DIR # the tests' folders are seen by all nodes
export A3PO_NODES=${#ALL[@]} A3PO_ACTORS="${ALL[*]}" A3PO_GPUS_BEFORE_ROLLOUT=""
say "$RANKS ranks on ${ALL[*]}; logs in $LOGS"
if [ "$GPUS_PER_NODE" -gt 0 ]; then export A3PO_TEST_ON_GPUS=1; fi
choose=()
if [ -n "$CHOOSE" ]; then choose=(-k "$CHOOSE"); fi
code=0
(srun_on torchrun "$LOGS/torchrun-%N.log" "${ALL[@]}" -- torch.distributed.run --nnodes "${#ALL[@]}" \
  --nproc-per-node $((RANKS / ${#ALL[@]})) --rdzv-backend static --master-addr "${ALL[0]}" --master-port $((20000 + SLURM_JOB_ID % 10000)) \
  -m pytest tests/distributed -q -p no:cacheprovider "${choose[@]}") || code=$?
for log in "$LOGS"/torchrun-*.log; do echo "--- the end of $log"; tail -n 8 "$log"; done
exit "$code"
