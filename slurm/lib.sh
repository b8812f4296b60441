# shellcheck shell=bash
# What every job script here does, once its settings are made. A script sources this file and calls `main "$@"`.
#
#   settings -> plan checked -> every node looked at -> run folder -> steps -> watch -> end in order
#
#   steps     one srun each, of this job alone: controller (first actor node), actor (its nodes), rollout-NODE (each)
#   watch     actor and controller end well: the job is done; either fails, or the last rollout node is gone: it failed
#   end       actor, rollout, controller: SIGTERM, a grace time, then SIGKILL; nothing but the job's own steps is touched
#
# `--dry-run` stops after the plan and needs no SLURM. Arguments like run.num_steps=50 change settings of the config.

say() { echo "[$(date +%T)] $*"; }
fail() { echo "error: $*" >&2; exit 2; }

main() {
  set -euo pipefail
  OVERRIDES=() DRY_RUN=
  local argument
  for argument in "$@"; do
    case $argument in
      --dry-run) DRY_RUN=1 ;;
      -*) fail "$argument: not an option; --dry-run, or settings such as run.num_steps=50" ;;
      controller.host=* | controller.port=* | rollout.host=* | rollout.base_port=* | actor.host=*)
        fail "$argument: the job chooses addresses and ports itself; INTERFACE says over which network"
        ;;
      model.path=* | run.dir=*) fail "$argument: set MODEL_PATH or RUN_DIR instead" ;;
      *=*) OVERRIDES+=("$argument") ;;
      *) fail "$argument: expected setting=value, for example run.num_steps=50" ;;
    esac
  done
  settle
  split_nodes
  if [ -n "$DRY_RUN" ]; then
    "${CONTAINER[@]}" "$PYTHON" -m recipes.job plan "${JOB_ARGUMENTS[@]}"
    return
  fi
  preflight
  start_roles
  watch_roles
  finish
}

# The site's own file, if there is one: SRUN_ARGS, CONTAINER, site_setup and variables.
load_site() {
  cd "$A3PO_HOME"
  SRUN_ARGS=() CONTAINER=()
  if [ -n "${SITE_ENV:-}" ] && [ ! -r "$SITE_ENV" ]; then fail "SITE_ENV=$SITE_ENV: cannot read it"; fi
  # shellcheck disable=SC1090  # the site's own file
  if [ -r "${SITE_ENV:=$A3PO_HOME/slurm/site.env}" ]; then source "$SITE_ENV"; fi
  : "${PYTHON:=$A3PO_HOME/.venv/bin/python}" "${GPUS_PER_NODE:=8}" "${GPU_MEMORY_GB:=80}" "${INTERFACE:=}" "${PREFLIGHT_S:=300}"
  [ ${#CONTAINER[@]} -gt 0 ] || command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON: no such program; run 'make setup' in $A3PO_HOME"
  export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} PYTHON SITE_ENV A3PO_HOME INTERFACE
}

# Defaults of what the script and the environment left open, and what can be checked without Python.
settle() {
  load_site
  : "${METHOD:=loglinear}" "${RUN_DIR:=$A3PO_HOME/runs/${SLURM_JOB_NAME:-dry-run}-${SLURM_JOB_ID:-0}}"
  : "${ACTOR_NODES:=1}" "${ROLLOUT_NODES:=1}" "${ACTOR_RANKS_PER_NODE:=$GPUS_PER_NODE}" "${MIN_FREE_GB:=50}" "${STOP_S:=45}"
  : "${TP:=}" "${PP:=}" "${CP:=}" "${EP:=}" "${DP:=}" "${ROLLOUT_TP:=}" "${REPLICAS_PER_NODE:=}"
  [ -n "${CONFIG:-}" ] || fail "CONFIG is not set: name the YAML file of the run"
  [ -r "$CONFIG" ] || fail "CONFIG=$CONFIG: cannot read it"
  [ -n "${MODEL_PATH:-}" ] || fail "MODEL_PATH is not set: name the Hugging Face folder of the model, on a shared file system"
  [ -r "$MODEL_PATH/config.json" ] || fail "MODEL_PATH=$MODEL_PATH: no config.json there; download the model to a shared file system"
  if [ -n "${DATA_DIR:-}" ]; then
    [ -d "$DATA_DIR" ] || fail "DATA_DIR=$DATA_DIR: no such folder"
    export A3PO_DATA=$DATA_DIR
  fi
  local name
  for name in ACTOR_NODES ROLLOUT_NODES ACTOR_RANKS_PER_NODE GPUS_PER_NODE GPU_MEMORY_GB MIN_FREE_GB STOP_S PREFLIGHT_S TP PP CP EP DP ROLLOUT_TP \
    REPLICAS_PER_NODE; do
    [[ ${!name:-0} =~ ^[0-9]+$ ]] || fail "$name=${!name}: expected a whole number"
  done
  settings_of_variables
}

# Variables -> settings of the config. What the user gives as an argument comes last and wins.
settings_of_variables() {
  local -a settings=("model.path=$MODEL_PATH" "run.dir=$RUN_DIR")
  case $METHOD in
    sync) settings+=(algorithm.method=sync controller.schedule=lockstep controller.max_staleness=0) ;;
    recompute | loglinear) settings+=("algorithm.method=$METHOD") ;;
    *) fail "METHOD=$METHOD: sync, recompute or loglinear" ;;
  esac
  local pair name
  for pair in TP:actor.tensor_parallel PP:actor.pipeline_parallel CP:actor.context_parallel EP:actor.expert_parallel \
    DP:actor.data_parallel ROLLOUT_TP:rollout.tensor_parallel REPLICAS_PER_NODE:rollout.num_servers; do
    name=${pair%%:*}
    [ -z "${!name}" ] || settings+=("${pair#*:}=${!name}")
  done
  OVERRIDES=("${settings[@]}" "${OVERRIDES[@]}")
}

# The first nodes are the actor's, the next ones the rollout's; a job of one node shares it.
split_nodes() {
  local -a nodes
  local needed=$((ACTOR_NODES + ROLLOUT_NODES)) i
  if [ "$ACTOR_NODES" = 1 ] && [ "$ROLLOUT_NODES" = 1 ] && [ "${SLURM_JOB_NUM_NODES:-${NODES:-2}}" = 1 ]; then needed=1; fi
  if [ -n "$DRY_RUN" ]; then
    for ((i = 1; i <= needed; i++)); do nodes+=("node$i"); done
  else
    [ -n "${SLURM_JOB_ID:-}" ] || fail "no SLURM job: submit with 'sbatch $0', or add --dry-run to see the plan"
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  fi
  [ ${#nodes[@]} = "$needed" ] || fail "the job has ${#nodes[@]} nodes, but ACTOR_NODES=$ACTOR_NODES + ROLLOUT_NODES=$ROLLOUT_NODES need $needed; sbatch --nodes=$needed"
  ACTORS=("${nodes[@]:0:ACTOR_NODES}")
  ROLLOUTS=("${nodes[@]: -ROLLOUT_NODES}")
  ALL=("${nodes[@]}")
  JOB_ARGUMENTS=("$CONFIG" "${OVERRIDES[@]}" --actor-nodes "$(join "${ACTORS[@]}")" --rollout-nodes "$(join "${ROLLOUTS[@]}")"
    --actor-ranks-per-node "$ACTOR_RANKS_PER_NODE" --gpus-per-node "$GPUS_PER_NODE" --gpu-memory-gb "$GPU_MEMORY_GB")
}

join() { local IFS=,; echo "$*"; }

# srun_on NAME LOG NODES... -- COMMAND...: one step with one task a node. %N in LOG is the node's name.
srun_on() {
  local name=$1 log=$2 gpus=()
  shift 2
  local -a nodes=()
  while [ "$1" != -- ]; do nodes+=("$1"); shift; done
  shift
  if [ "$GPUS_PER_NODE" -gt 0 ]; then gpus=("--gpus-per-node=$GPUS_PER_NODE"); fi
  exec srun --overlap --nodes=${#nodes[@]} --ntasks=${#nodes[@]} --ntasks-per-node=1 -w "$(join "${nodes[@]}")" --job-name="$name" \
    --output="$log" --error="$log" --open-mode=append --kill-on-bad-exit=1 --mpi=none "${gpus[@]}" "${SRUN_ARGS[@]}" \
    "$A3PO_HOME/slurm/node.sh" "$@"
}

preflight() {
  HEAD=$(bash "$A3PO_HOME/slurm/node.sh" address "${#ALL[@]}") || exit 2
  # A run's folder may outlive several attempts of its job: one folder of logs each.
  LOGS=$RUN_DIR/logs/job-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
  say "job $SLURM_JOB_ID: actor on ${ACTORS[*]}, rollout on ${ROLLOUTS[*]}; logs in $LOGS"
  mkdir -p "$LOGS" || fail "RUN_DIR=$RUN_DIR: cannot write there; name a folder of yours on a shared file system"
  one_line_of plan "${ALL[0]}" -- recipes.job plan "${JOB_ARGUMENTS[@]}"
  sed -n '1,$p' "$LOGS/plan.log"
  local facts=$LOGS/nodes canary=$SLURM_JOB_ID.$RANDOM
  mkdir -p "$facts"
  echo "$canary" >"$facts/canary"
  one_line_of nodes "${ALL[@]}" -- recipes.job node "${JOB_ARGUMENTS[@]}" --facts "$facts" --canary "$canary" --job-id "$SLURM_JOB_ID"
  one_line_of open "${ALL[0]}" -- recipes.job open "${JOB_ARGUMENTS[@]}" --facts "$facts" --min-free-gb "$MIN_FREE_GB"
  PORT=$(tail -n 1 "$LOGS/open.log")
  [[ $PORT =~ ^[0-9]+$ ]] || fail "no port in $LOGS/open.log"
}

# one_line_of NAME NODES... -- MODULE...: a check in a step; if it fails the job ends with what the check said.
one_line_of() {
  local name=$1 code=0
  (srun_on "$name" "$LOGS/$name.log" "${@:2}") 2>"$LOGS/$name.srun" &
  wait_for $! "$PREFLIGHT_S" || code=$?
  [ "$code" = 0 ] && return
  grep -h '^error: ' "$LOGS/$name.log" | tail -n 1 >&2 || tail -n 5 "$LOGS/$name.log" "$LOGS/$name.srun" >&2
  say "the check '$name' ended with exit code $code; nothing was started" >&2
  exit "$((code == 2 ? 2 : 1))"
}

# wait_for PID SECONDS: its exit code, or 124 after killing it.
wait_for() {
  local pid=$1 end=$((SECONDS + $2))
  while kill -0 "$pid" 2>/dev/null && [ -z "${STOPPED:-}" ]; do
    [ $SECONDS -lt $end ] || { kill -KILL "$pid" 2>/dev/null || true; wait "$pid" 2>/dev/null || true; return 124; }
    sleep 0.1
  done
  wait "$pid"
}

declare -A ROLE_OF=()
start_role() {
  local role=$1
  shift
  (srun_on "$role" "$LOGS/${role%%-*}-%N.log" "$@") 2>>"$LOGS/$role.srun" &
  ROLE_OF[$!]=$role
}

start_roles() {
  trap 'STOPPED=TERM' TERM INT
  trap 'STOPPED=USR1' USR1
  local shared="" node url="http://$HEAD:$PORT"
  if [ ${#ALL[@]} = 1 ]; then shared=1; fi
  local -a common=("$CONFIG" "${OVERRIDES[@]}" "controller.host=$HEAD" "controller.port=$PORT")
  export A3PO_GPUS_BEFORE_ROLLOUT=${shared:+$ACTOR_RANKS_PER_NODE}
  start_role controller "${ACTORS[0]}" -- recipes.controller "${common[@]}"
  for node in "${ROLLOUTS[@]}"; do
    start_role "rollout-$node" "$node" -- recipes.rollout "${common[@]}" "rollout.base_port=$((PORT + 2))" \
      --controller "$url" --node "$node" --log-dir "$LOGS"
  done
  start_role actor "${ACTORS[@]}" -- recipes.actor "${common[@]}" --nodes "${#ACTORS[@]}" --master "$HEAD:$((PORT + 1))"
  echo "$url" >"$LOGS/controller.url"
  say "controller at $url; started ${ROLE_OF[*]}"
}

# Sets REASON and CODE when the job is over.
watch_roles() {
  local who code rollouts=${#ROLLOUTS[@]} done_roles=0
  REASON="" CODE=0 FAILED_LOGS=()
  while [ -z "$REASON" ] && [ "$done_roles" -lt 2 ]; do
    who="" code=0
    if [ -z "${STOPPED:-}" ]; then wait -n -p who "${!ROLE_OF[@]}" || code=$?; fi
    if [ -n "${STOPPED:-}" ]; then
      CODE=$([ "$STOPPED" = USR1 ] && echo 1 || echo 143)
      REASON=$([ "$STOPPED" = USR1 ] && echo "the job's time is nearly over" || echo "stopped by SIGTERM")
      continue
    fi
    [ -n "$who" ] || continue
    local role=${ROLE_OF[$who]}
    unset "ROLE_OF[$who]"
    case $role in
      rollout-*)
        rollouts=$((rollouts - 1))
        say "$role ended with exit code $code; $rollouts rollout nodes are left"
        [ "$rollouts" -gt 0 ] || { CODE=$((code ? code : 1)); last_words "$role"; REASON="no rollout node is left; the last was $role"; }
        ;;
      *)
        if [ "$code" = 0 ]; then done_roles=$((done_roles + 1)); else CODE=$code; last_words "$role"; REASON="$role ended with exit code $CODE"; fi
        ;;
    esac
  done
}

# Sets FAILED_LOGS, and CODE if srun tells: those of the node that srun names first, since the others only follow it.
last_words() {
  local role=$1 node="" code=""
  read -r node code < <(sed -nE 's/^srun: error: ([A-Za-z0-9._-]+): task.*exit code ([0-9]+)$/\1 \2/p' "$LOGS/$role.srun" | head -n 1) || true
  if [ -n "$code" ]; then CODE=$code; fi
  FAILED_LOGS=("$LOGS/${role%%-*}-$node.log")
  if [ ! -s "${FAILED_LOGS[0]}" ]; then FAILED_LOGS=("$LOGS/${role%%-*}"-*.log "$LOGS/$role.srun"); fi
}

finish() {
  local role log
  for role in actor rollout controller; do stop_roles "$role"; done
  if [ -z "$REASON" ]; then
    say "done: model in $RUN_DIR/model, metrics in $RUN_DIR/metrics.jsonl"
    exit 0
  fi
  for log in "${FAILED_LOGS[@]}"; do
    [ -s "$log" ] || continue
    echo "--- the end of $log"
    grep -v '^\s*$' "$log" | tail -n 8
  done
  say "failed: $REASON; logs in $LOGS"
  grep -h '^error: ' "${FAILED_LOGS[@]}" /dev/null | tail -n 1 || true
  exit "$CODE"
}

# stop_roles PREFIX: ask the steps of these roles to end, kill those that have not after STOP_S.
stop_roles() {
  local -A left=()
  local pid step id
  for pid in "${!ROLE_OF[@]}"; do case ${ROLE_OF[$pid]} in "$1" | "$1"-*) left[$pid]=${ROLE_OF[$pid]} ;; esac; done
  [ ${#left[@]} -gt 0 ] || return 0
  while read -r id step; do
    for pid in "${!left[@]}"; do
      # scancel reports an error for a step that lives on some of the job's nodes only, although the signal arrives
      if [ "${left[$pid]}" = "$step" ]; then scancel --signal=TERM "$id" 2>/dev/null || true; fi
    done
  done < <(timeout 30 squeue --noheader --steps --job "$SLURM_JOB_ID" --format '%i %j' || true)
  local end=$((SECONDS + STOP_S))
  for pid in "${!left[@]}"; do
    while kill -0 "$pid" 2>/dev/null && [ $SECONDS -lt $end ]; do sleep 0.1; done
    if kill -0 "$pid" 2>/dev/null; then
      say "${left[$pid]} did not end within $STOP_S s and is killed"
      kill -TERM "$pid" 2>/dev/null || true # srun then kills its step at once
    fi
    wait "$pid" 2>/dev/null || true
    unset "ROLE_OF[$pid]"
  done
}
