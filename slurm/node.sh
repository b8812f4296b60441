#!/usr/bin/env bash
# Runs on every node of a step: finds the node's address, gives the role its own settings, becomes `python -m MODULE ARGUMENTS`.
set -euo pipefail

fail() { echo "error: $*" >&2; exit 2; }

# Sets A3PO_ADDRESS, at which the job's other nodes reach this one.
find_address() {
  if [ "$A3PO_NODES" = 1 ]; then
    A3PO_ADDRESS=127.0.0.1
    return
  fi
  if [ -n "${INTERFACE:-}" ]; then
    A3PO_ADDRESS=$(ip -o -4 addr show dev "$INTERFACE" 2>/dev/null | awk '{split($4, part, "/"); print part[1]; exit}') || true
    [ -n "$A3PO_ADDRESS" ] || fail "INTERFACE=$INTERFACE: $(hostname) has no such interface with an IPv4 address"
  else
    A3PO_ADDRESS=$(getent ahostsv4 "$(hostname)" | awk '{print $1; exit}') || true
  fi
  case $A3PO_ADDRESS in
    "" | 127.*) fail "$(hostname) resolves to '${A3PO_ADDRESS:-nothing}', where no other node reaches it; set INTERFACE, for example to ib0" ;;
  esac
}

# Sets NODE_RANK: the place of this node among the actor's.
find_rank() {
  local node
  NODE_RANK=0
  for node in $A3PO_ACTORS; do
    if [ "$node" = "$SLURMD_NODENAME" ]; then return; fi
    NODE_RANK=$((NODE_RANK + 1))
  done
  fail "$SLURMD_NODENAME is none of the actor's nodes $A3PO_ACTORS"
}

# show_gpus FIRST COUNT: of the node's GPUs, which the roles share
show_gpus() {
  local -a all
  IFS=, read -r -a all <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $(($1 + $2 - 1)))}"
  local IFS=,
  export CUDA_VISIBLE_DEVICES="${all[*]:$1:$2}"
}

CONTAINER=()
set +eu # what a site writes is not ours to be strict about
# shellcheck disable=SC1090  # the site's own file
if [ -r "${SITE_ENV:-}" ]; then source "$SITE_ENV"; fi
if declare -F site_setup >/dev/null; then site_setup; fi
set -eu
cd "$A3PO_HOME"
find_address
export A3PO_ADDRESS PYTHONPATH="$A3PO_HOME${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ -n "${INTERFACE:-}" ]; then export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$INTERFACE}; fi

own=()
case $1 in
  recipes.actor)
    find_rank
    own=("actor.host=$A3PO_ADDRESS" --node-rank "$NODE_RANK")
    if [ -n "$A3PO_GPUS_BEFORE_ROLLOUT" ]; then show_gpus 0 "$A3PO_GPUS_BEFORE_ROLLOUT"; fi
    ;;
  recipes.rollout)
    own=("rollout.host=$A3PO_ADDRESS")
    if [ -n "$A3PO_GPUS_BEFORE_ROLLOUT" ]; then show_gpus "$A3PO_GPUS_BEFORE_ROLLOUT" 64; fi
    ;;
  torch.distributed.run)
    find_rank
    shift
    set -- torch.distributed.run --node-rank "$NODE_RANK" "$@"
    ;;
esac
exec "${CONTAINER[@]}" "$PYTHON" -m "$@" "${own[@]}"
