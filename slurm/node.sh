#!/usr/bin/env bash
# Runs on every node of a step: finds the node's address, gives the role its own settings, becomes the role.
#   node.sh MODULE ARGUMENTS...     python -m MODULE with what is this node's own
#   node.sh address NODES           prints the address at which the others reach this node
set -euo pipefail

fail() { echo "error: $*" >&2; exit 2; }

address_of_node() { # NODES of the job
  local address
  if [ "$1" = 1 ]; then echo 127.0.0.1; return; fi
  if [ -n "${INTERFACE:-}" ]; then
    address=$(ip -o -4 addr show dev "$INTERFACE" 2>/dev/null | awk '{split($4, part, "/"); print part[1]; exit}') || true
    [ -n "$address" ] || fail "INTERFACE=$INTERFACE: $(hostname) has no such interface with an IPv4 address"
  else
    address=$(getent ahostsv4 "$(hostname)" | awk '{print $1; exit}') || true
  fi
  case $address in
    "" | 127.*) fail "$(hostname) resolves to '${address:-nothing}', where no other node reaches it; set INTERFACE, for example to ib0" ;;
  esac
  echo "$address"
}

if [ "$1" = address ]; then address_of_node "$2"; exit; fi

CONTAINER=()
# shellcheck disable=SC1090  # the site's own file
if [ -r "${SITE_ENV:-}" ]; then source "$SITE_ENV"; fi
if declare -F site_setup >/dev/null; then site_setup; fi
cd "$A3PO_HOME"
export PYTHONPATH="$A3PO_HOME${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ -n "${INTERFACE:-}" ]; then export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$INTERFACE}; fi

# gpus FIRST COUNT: this role sees these GPUs of the node, where roles share it
gpus() {
  local -a all
  IFS=, read -r -a all <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $(($1 + $2 - 1)))}"
  local IFS=,
  export CUDA_VISIBLE_DEVICES="${all[*]:$1:$2}"
}

own=()
case $1 in
  recipes.actor)
    own=("actor.host=$(address_of_node "$SLURM_JOB_NUM_NODES")" --node-rank "$SLURM_PROCID")
    if [ -n "${A3PO_GPUS_BEFORE_ROLLOUT:-}" ]; then gpus 0 "$A3PO_GPUS_BEFORE_ROLLOUT"; fi
    ;;
  torch.distributed.run) shift; set -- torch.distributed.run --node-rank "$SLURM_PROCID" "$@" ;;
  recipes.rollout)
    own=("rollout.host=$(address_of_node "$SLURM_JOB_NUM_NODES")")
    if [ -n "${A3PO_GPUS_BEFORE_ROLLOUT:-}" ]; then gpus "$A3PO_GPUS_BEFORE_ROLLOUT" 64; fi
    ;;
esac
exec "${CONTAINER[@]}" "$PYTHON" -m "$@" "${own[@]}"
