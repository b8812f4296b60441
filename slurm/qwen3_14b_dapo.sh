#!/usr/bin/env bash
# Qwen3-14B on DAPO-Math-17k: 4 nodes of 8 H100, 2 for the actor, 2 for rollout.
#
#   sbatch slurm/qwen3_14b_dapo.sh [setting=value ...]          bash slurm/qwen3_14b_dapo.sh --dry-run     shows the plan, needs no SLURM
#
# Needs MODEL_PATH and DATA_DIR (the folder that holds gsm8k/, dapo/, math500/ ...), on a file system that all nodes share. Every variable: docs/slurm.md.
#SBATCH --job-name=a3po-qwen3-14b
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=72:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --signal=B:USR1@300

: "${CONFIG:=configs/qwen3_14b_dapo.yaml}"  # memory and times are explained there
: "${METHOD:=loglinear}"  # sync | recompute | loglinear
: "${NODES:=4}"  # of a dry run; the job's own come from #SBATCH or sbatch --nodes
: "${ACTOR_NODES:=2}" "${ROLLOUT_NODES:=2}"
# TP, PP, CP, EP, DP, ROLLOUT_TP and REPLICAS_PER_NODE replace what the config says.

# sbatch runs a copy of this file from elsewhere, so the rest is found through the folder it was submitted from.
: "${A3PO_HOME:=${SLURM_SUBMIT_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}}"
[ -r "$A3PO_HOME/slurm/lib.sh" ] || { echo "error: A3PO_HOME=$A3PO_HOME: no slurm/lib.sh there; submit from the repository" >&2; exit 2; }
# shellcheck source=slurm/lib.sh
source "$A3PO_HOME/slurm/lib.sh"
main "$@"
