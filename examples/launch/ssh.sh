#!/usr/bin/env bash
# Start one node on each machine that ssh reaches; stop them all with Ctrl-C here.
#
#   export GRADIENTMAIL_MAILBOX=s3://bucket/run-1 AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=…
#   examples/launch/ssh.sh examples/train.py user@gpu-a user@gpu-b -- --steps 2000 --sync-every 50
#
# Identity: node-0, node-1, … in the order of the machines; keep the order when you start it again.
# Credentials: this shell's, with the GRADIENTMAIL_RUN_KEY of a signed run, sent through ssh's standard input, so that they show in no process list and no file.
# Restart: a node that dies is started again under its name after 5 seconds, as often as RESTARTS says (10).
# Each machine needs this repository at FOLDER (~/gradientmail) with its .venv: run `make venv` there once.
set -euo pipefail

: "${GRADIENTMAIL_MAILBOX:?set it to the URL of the run, for example s3://bucket/run-1}"
FOLDER=${FOLDER:-gradientmail}
RESTARTS=${RESTARTS:-10}
SSH=${SSH:-ssh}
script=${1:?give the training script, the machines, and then -- and its arguments}
shift

machines=()
while (($#)) && [[ $1 != -- ]]; do
  machines+=("$1")
  shift
done
if (($#)); then shift; fi
((${#machines[@]})) || { echo "no machine given" >&2; exit 2; }

# What the remote shell reads. Values are quoted by printf, since they may hold anything.
remote() {
  local learner_id=$1
  shift
  local name
  for name in GRADIENTMAIL_MAILBOX GRADIENTMAIL_RUN_KEY AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AWS_REGION \
    AWS_DEFAULT_REGION AWS_ENDPOINT_URL; do
    if [[ -n ${!name:-} ]]; then printf 'export %s=%q\n' "$name" "${!name}"; fi
  done
  printf 'export GRADIENTMAIL_LEARNER_ID=%q\n' "$learner_id"
  printf 'cd %q\n' "$FOLDER"
  # The node is a child, so that a signal to this shell reaches it and is waited for.
  # shellcheck disable=SC2016
  printf '%s\n' 'node=; trap '\''[ -z "$node" ] || kill -TERM "$node"; stopped=1'\'' TERM INT HUP; stopped='
  printf 'for attempt in $(seq 0 %q); do\n' "$RESTARTS"
  printf '  .venv/bin/torchrun --standalone --nproc-per-node=1 %q' "$script"
  printf ' %q' --mailbox "$GRADIENTMAIL_MAILBOX" --learner-id "$learner_id" "$@"
  # shellcheck disable=SC2016
  printf ' </dev/null &\n  node=$!; wait "$node" && exit 0\n  code=$?; [ -z "$stopped" ] || { wait "$node"; exit 0; }\n'
  # shellcheck disable=SC2016
  printf '  echo "%s ended with $code, starting it again" >&2; sleep 5\ndone\nexit 1\n' "$learner_id"
}

pids=()
for place in "${!machines[@]}"; do
  # -tt would send Ctrl-C through; without a terminal the connection's end hangs the remote shell up, which stops the node.
  remote "node-$place" "$@" | "$SSH" "${machines[$place]}" bash -s 2>&1 | sed "s/^/node-$place: /" &
  pids+=($!)
done
trap 'kill "${pids[@]}" 2>/dev/null || true' INT TERM
failed=0
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
exit "$failed"
