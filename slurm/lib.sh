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

POLL_S=0.2
declare -A ROLE_OF=() # process id of a step's srun -> role
STOPPED="" REASON="" CODE=0 FAILED_LOGS=()

say() { echo "[$(date +%T)] $*"; }
fail() { echo "error: $*" >&2; exit 2; }
pause() { sleep $POLL_S || true; } # a signal to the whole job ends a sleep too
join() { local IFS=,; echo "$*"; }

main() {
  set -euo pipefail
  trap 'STOPPED=TERM' TERM INT
  trap 'STOPPED=USR1' USR1
  read_arguments "$@"
  settle
  split_nodes
  if [ -n "$DRY_RUN" ]; then
    "${CONTAINER[@]}" "${HOST_PYTHON:-$PYTHON}" -m recipes.job plan "${JOB_ARGUMENTS[@]}"
    return
  fi
  preflight
  start_roles
  watch_roles
  finish
}

read_arguments() {
  local argument
  OVERRIDES=() DRY_RUN=""
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
}

# The site's own file, if there is one: SRUN_ARGS, CONTAINER, site_setup and variables.
load_site() {
  cd "$A3PO_HOME"
  SRUN_ARGS=() CONTAINER=()
  if [ -n "${SITE_ENV:-}" ] && [ ! -r "$SITE_ENV" ]; then fail "SITE_ENV=$SITE_ENV: cannot read it"; fi
  set +eu # what a site writes is not ours to be strict about
  # shellcheck disable=SC1090  # the site's own file
  if [ -r "${SITE_ENV:=$A3PO_HOME/slurm/site.env}" ]; then source "$SITE_ENV"; fi
  set -eu
  : "${PYTHON:=$A3PO_HOME/.venv/bin/python}" "${GPUS_PER_NODE:=8}" "${GPU_MEMORY_GB:=80}" "${INTERFACE:=}" "${PREFLIGHT_S:=300}"
  if ! in_container && ! command -v "$PYTHON" >/dev/null; then
    fail "PYTHON=$PYTHON: no such program; make the environment that docs/slurm.md names, or set CONTAINER or SRUN_ARGS in $SITE_ENV"
  fi
  if [ -n "${DATA_DIR:-}" ]; then
    [ -d "$DATA_DIR" ] || fail "DATA_DIR=$DATA_DIR: no such folder"
    export A3PO_DATA=$DATA_DIR
  fi
  export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} PYTHON SITE_ENV A3PO_HOME INTERFACE
}

# Whether PYTHON lies in a container, where this shell cannot look for it.
in_container() { [ ${#CONTAINER[@]} -gt 0 ] || [[ " ${SRUN_ARGS[*]-} " == *" --container"* ]]; }

# Defaults of what the script and the environment left open, and what can be checked without Python.
settle() {
  load_site
  : "${RUN_DIR:=$A3PO_HOME/runs/${SLURM_JOB_NAME:-dry-run}-${SLURM_JOB_ID:-0}}"
  : "${ACTOR_RANKS_PER_NODE:=$GPUS_PER_NODE}" "${MIN_FREE_GB:=50}" "${STOP_S:=45}" "${SRUN_END_S:=60}"
  : "${TP:=}" "${PP:=}" "${CP:=}" "${EP:=}" "${DP:=}" "${ROLLOUT_TP:=}" "${REPLICAS_PER_NODE:=}" "${LAST_ROLE_S:=3600}"
  export RUN_DIR
  [ -n "${CONFIG:-}" ] || fail "CONFIG is not set: name the YAML file of the run"
  [ -r "$CONFIG" ] || fail "CONFIG=$CONFIG: cannot read it"
  [ -n "${MODEL_PATH:-}" ] || fail "MODEL_PATH is not set: name the Hugging Face folder of the model, on a shared file system"
  [ -r "$MODEL_PATH/config.json" ] || fail "MODEL_PATH=$MODEL_PATH: no config.json there; download the model to a shared file system"
  local name
  for name in ACTOR_NODES ROLLOUT_NODES ACTOR_RANKS_PER_NODE STOP_S SRUN_END_S PREFLIGHT_S LAST_ROLE_S TP PP CP EP DP ROLLOUT_TP REPLICAS_PER_NODE; do
    [[ ${!name:-1} =~ ^[1-9][0-9]*$ ]] || fail "$name=${!name}: expected a whole number above 0"
  done
  for name in GPUS_PER_NODE GPU_MEMORY_GB MIN_FREE_GB; do
    [[ ${!name} =~ ^(0|[1-9][0-9]*)$ ]] || fail "$name=${!name}: expected a whole number"
  done
  local allocated=${SLURM_GPUS_PER_NODE:-$GPUS_PER_NODE}
  [ "${allocated##*:}" = "$GPUS_PER_NODE" ] ||
    fail "GPUS_PER_NODE=$GPUS_PER_NODE, but the job has $allocated a node; set it, or sbatch --gpus-per-node=$GPUS_PER_NODE"
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
  local needed=$((ACTOR_NODES + ROLLOUT_NODES)) i
  ALL=()
  if [ -n "$DRY_RUN" ]; then
    for ((i = 1; i <= ${NODES:-needed}; i++)); do ALL+=("node$i"); done
  else
    [ -n "${SLURM_JOB_ID:-}" ] || fail "no SLURM job: submit with 'sbatch $0', or add --dry-run to see the plan"
    mapfile -t ALL < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  fi
  if [ ${#ALL[@]} = 1 ] && [ "$needed" = 2 ]; then needed=1; fi
  [ ${#ALL[@]} = "$needed" ] || fail "the job has ${#ALL[@]} nodes, but ACTOR_NODES=$ACTOR_NODES + ROLLOUT_NODES=$ROLLOUT_NODES need $needed; sbatch --nodes=$needed"
  ACTORS=("${ALL[@]:0:ACTOR_NODES}")
  ROLLOUTS=("${ALL[@]: -ROLLOUT_NODES}")
  JOB_ARGUMENTS=("$CONFIG" "${OVERRIDES[@]}" --actor-nodes "$(join "${ACTORS[@]}")" --rollout-nodes "$(join "${ROLLOUTS[@]}")"
    --actor-ranks-per-node "$ACTOR_RANKS_PER_NODE" --gpus-per-node "$GPUS_PER_NODE" --gpu-memory-gb "$GPU_MEMORY_GB")
  # For node.sh: how many nodes the job has, which are the actor's, and how many GPUs of a shared node are.
  export A3PO_NODES=${#ALL[@]} A3PO_ACTORS="${ACTORS[*]}" A3PO_GPUS_BEFORE_ROLLOUT=""
  if [ ${#ALL[@]} = 1 ]; then A3PO_GPUS_BEFORE_ROLLOUT=$ACTOR_RANKS_PER_NODE; fi
}

# srun_on NAME LOG NODES... -- MODULE...: becomes a step with one task a node. %N in LOG is the node's name.
srun_on() {
  local name=$1 log=$2
  local -a nodes=() gpus=()
  shift 2
  while [ "$1" != -- ]; do nodes+=("$1"); shift; done
  shift
  if [ "$GPUS_PER_NODE" -gt 0 ]; then gpus=("--gpus-per-node=$GPUS_PER_NODE"); fi
  exec srun --overlap --export=ALL --nodes=${#nodes[@]} --ntasks=${#nodes[@]} --ntasks-per-node=1 -w "$(join "${nodes[@]}")" \
    --job-name="$name" --output="$log" --error="$log" --open-mode=append --kill-on-bad-exit=1 --mpi=none "${gpus[@]}" \
    "${SRUN_ARGS[@]}" "$A3PO_HOME/slurm/node.sh" "$@"
}

preflight() {
  # A run's folder may outlive several attempts of its job: one folder of logs each.
  LOGS=$RUN_DIR/logs/job-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
  say "job $SLURM_JOB_ID: actor on ${ACTORS[*]}, rollout on ${ROLLOUTS[*]}; logs in $LOGS"
  local facts=$LOGS/nodes canary=$SLURM_JOB_ID.$RANDOM
  mkdir -p "$facts" || fail "RUN_DIR=$RUN_DIR: cannot write there; name a folder of yours on a shared file system"
  echo "$canary" >"$facts/canary"
  check plan "${ALL[0]}" -- recipes.job plan "${JOB_ARGUMENTS[@]}"
  cat "$LOGS/plan.log"
  check nodes "${ALL[@]}" -- recipes.job node "${JOB_ARGUMENTS[@]}" --facts "$facts" --canary "$canary" --job-id "$SLURM_JOB_ID"
  check open "${ALL[0]}" -- recipes.job open "${JOB_ARGUMENTS[@]}" --facts "$facts" --min-free-gb "$MIN_FREE_GB"
  read -r HEAD PORT < <(tail -n 1 "$LOGS/open.log") || true
  [[ ${PORT:-} =~ ^[0-9]+$ ]] || fail "no address and port in the last line of $LOGS/open.log"
}

# check NAME NODES... -- MODULE...: a short step; if it fails, the job ends with what it said and nothing is started.
check() {
  local name=$1 code=0 end=$((SECONDS + PREFLIGHT_S)) pid
  (srun_on "$name" "$LOGS/$name.log" "${@:2}") 2>"$LOGS/$name.srun" &
  pid=$!
  while kill -0 "$pid" 2>/dev/null && [ -z "$STOPPED" ] && [ $SECONDS -lt $end ]; do pause; done
  if kill -0 "$pid" 2>/dev/null; then
    end_sruns "$pid"
    [ -n "$STOPPED" ] || fail "the check '$name' did not end within PREFLIGHT_S=$PREFLIGHT_S s; nothing was started; see $LOGS/$name.*"
  else
    wait "$pid" || code=$?
  fi
  if [ -n "$STOPPED" ]; then say "failed: $(stop_reason) during the check '$name'; nothing was started"; exit 1; fi
  [ "$code" != 0 ] || return 0
  if ! grep -hs '^error: ' "$LOGS/$name.log" | tail -n 1 | grep . >&2; then
    cat "$LOGS/$name.srun" "$LOGS/$name.log" 2>/dev/null | tail -n 8 >&2 || true
  fi
  say "the check '$name' ended with exit code $code; nothing was started" >&2
  exit "$((code == 2 ? 2 : 1))"
}

# Told so, srun ends its step at once. Those that hang are killed; SLURM ends their steps with the job.
end_sruns() { # PID...
  local end=$((SECONDS + SRUN_END_S)) pid
  for pid in "$@"; do kill -TERM "$pid" 2>/dev/null || true; done
  for pid in "$@"; do
    while kill -0 "$pid" 2>/dev/null && [ $SECONDS -lt $end ]; do pause; done
    kill -KILL "$pid" 2>/dev/null || true
  done
}

stop_reason() { if [ "$STOPPED" = USR1 ]; then echo "the job's time is nearly over"; else echo "stopped by SIGTERM"; fi; }

start_role() {
  local role=$1
  shift
  (srun_on "$role" "$LOGS/${role%%-*}-%N.log" "$@") 2>>"$LOGS/$role.srun" &
  ROLE_OF[$!]=$role
}

start_roles() {
  local node url="http://$HEAD:$PORT"
  local -a common=("$CONFIG" "${OVERRIDES[@]}" "controller.host=$HEAD" "controller.port=$PORT")
  start_role controller "${ACTORS[0]}" -- recipes.controller "${common[@]}"
  for node in "${ROLLOUTS[@]}"; do
    start_role "rollout-$node" "$node" -- recipes.rollout "${common[@]}" "rollout.base_port=$((PORT + 2))" \
      --controller "$url" --node "$node" --log-dir "$LOGS"
  done
  start_role actor "${ACTORS[@]}" -- recipes.actor "${common[@]}" --nodes "${#ACTORS[@]}" --master "$HEAD:$((PORT + 1))"
  say "controller at $url; started controller, actor and rollout on ${ROLLOUTS[*]}"
}

# Sets REASON and CODE when the job is over. Looks at its steps instead of `wait -n`, which older shells lack or lose ends with.
watch_roles() {
  local pid code rollouts=${#ROLLOUTS[@]} well=0 last_by=0
  while [ -z "$REASON" ] && [ "$well" -lt 2 ]; do
    pause
    if [ -n "$STOPPED" ]; then
      REASON=$(stop_reason) CODE=1
      if [ "$STOPPED" = TERM ]; then CODE=143; fi
      return
    fi
    if [ "$last_by" -gt 0 ] && [ $SECONDS -gt "$last_by" ]; then
      REASON="one of actor and controller ended well, but the other did not within LAST_ROLE_S=$LAST_ROLE_S s" CODE=1
      return
    fi
    for pid in "${!ROLE_OF[@]}"; do
      if kill -0 "$pid" 2>/dev/null || [ -n "$REASON" ]; then continue; fi
      code=0
      wait "$pid" || code=$?
      role_ended "${ROLE_OF[$pid]}" "$code"
      unset "ROLE_OF[$pid]"
    done
  done
}

role_ended() { # ROLE CODE; uses the counters of watch_roles
  case $1 in
    rollout-*)
      rollouts=$((rollouts - 1))
      say "$1 ended with exit code $2; $rollouts rollout nodes are left"
      if [ "$rollouts" = 0 ]; then
        CODE=$(($2 ? $2 : 1))
        last_words "$1"
        REASON="no rollout node is left; the last was $1"
      fi
      ;;
    *)
      if [ "$2" = 0 ]; then
        well=$((well + 1)) last_by=$((SECONDS + LAST_ROLE_S))
      else
        CODE=$2
        last_words "$1"
        REASON="$1 ended with exit code $CODE"
      fi
      ;;
  esac
}

# Sets FAILED_LOGS, and CODE if srun tells: those of the node that srun names first, since the others only follow it.
last_words() {
  local role=$1 line node code
  line=$(grep -E '^srun: error: [A-Za-z0-9._-]+: task' "$LOGS/$role.srun" | head -n 1) || true
  node=$(sed -nE 's/^srun: error: ([A-Za-z0-9._-]+): task.*/\1/p' <<<"$line")
  code=$(sed -nE 's/.*exit code ([0-9]+)$/\1/p' <<<"$line")
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
    grep -v '^\s*$' "$log" | tail -n 8 || true
  done
  say "failed: $REASON; logs in $LOGS"
  grep -hs '^error: ' "${FAILED_LOGS[@]}" /dev/null | tail -n 1 || true
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
      if [ "${left[$pid]}" = "$step" ]; then timeout 30 scancel --signal=TERM "$id" 2>/dev/null || true; fi
    done
  done < <(timeout 30 squeue --noheader --steps --job "$SLURM_JOB_ID" --format '%i %j' || true)
  local end=$((SECONDS + STOP_S)) late=()
  for pid in "${!left[@]}"; do
    while kill -0 "$pid" 2>/dev/null && [ $SECONDS -lt $end ]; do pause; done
    if kill -0 "$pid" 2>/dev/null; then late+=("$pid"); fi
  done
  for pid in "${late[@]}"; do say "${left[$pid]} did not end within $STOP_S s and is killed"; done
  end_sruns "${late[@]}"
  for pid in "${!left[@]}"; do wait "$pid" 2>/dev/null || true; unset "ROLE_OF[$pid]"; done
}
