#!/usr/bin/env bash
# Qwen2.5-1.5B on GSM8K: one node of 8 H100, half for the actor, half for rollout.
#
#   sbatch slurm/qwen2_5_1p5b_gsm8k.sh [setting=value ...]          bash slurm/qwen2_5_1p5b_gsm8k.sh --dry-run     shows the plan, needs no SLURM
#
# Needs MODEL_PATH and DATA_DIR (the folder that holds gsm8k/, dapo/, math500/ ...), on a file system that all nodes share. Every variable: docs/slurm.md.
#SBATCH --job-name=a3po-qwen2.5-1.5b
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=08:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --signal=B:USR1@300

: "${CONFIG:=configs/qwen2_5_1p5b_gsm8k.yaml}"  # memory and times are explained there
: "${METHOD:=loglinear}"  # sync | recompute | loglinear
: "${NODES:=1}"  # of a dry run; the job's own come from #SBATCH or sbatch --nodes
: "${ACTOR_NODES:=1}" "${ROLLOUT_NODES:=1}"  # the same node
: "${ACTOR_RANKS_PER_NODE:=4}"
# TP, PP, CP, EP, DP, ROLLOUT_TP and REPLICAS_PER_NODE replace what the config says.

# sbatch runs a copy of this file from elsewhere, so the rest is found through the folder it was submitted from.
: "${A3PO_HOME:=${SLURM_SUBMIT_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}}"
[ -r "$A3PO_HOME/slurm/lib.sh" ] || { echo "error: A3PO_HOME=$A3PO_HOME: no slurm/lib.sh there; submit from the repository" >&2; exit 2; }
# shellcheck source=slurm/lib.sh
source "$A3PO_HOME/slurm/lib.sh"
main "$@"
