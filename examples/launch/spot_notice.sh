#!/usr/bin/env bash
# Run a command, and stop it in order when the cloud says that this spot machine will be taken away.
#
#   examples/launch/spot_notice.sh torchrun --standalone --nproc-per-node=1 examples/train.py …
#
# AWS says so two minutes before, Google Cloud thirty seconds before, both at the link-local metadata address.
# The command gets SIGTERM: a node publishes what it has done within leave_timeout (10 s) and leaves, so that no
# round waits for it. Without a notice it is as if this were not here. A node that dies unasked loses at most a cycle.
#
# Identity and credentials: those of the command. Restart: by whatever started this; the exit status is the
# command's, or 143 after a notice, which launchers take as a failure and start anew elsewhere.
set -uo pipefail

METADATA=${METADATA:-http://169.254.169.254}
EVERY=${EVERY:-5}
(($#)) || { echo "usage: spot_notice.sh COMMAND …" >&2; exit 2; }

get() { curl --silent --fail --noproxy '*' --max-time 2 "$@"; }

# Whether a notice has been given. AWS: this document is missing (404) until then. Google Cloud: it says TRUE.
noticed() {
  local token
  token=$(get --request PUT --header 'X-aws-ec2-metadata-token-ttl-seconds: 60' "$METADATA/latest/api/token") || token=
  get ${token:+--header "X-aws-ec2-metadata-token: $token"} --output /dev/null "$METADATA/latest/meta-data/spot/instance-action" && return 0
  [[ $(get --header 'Metadata-Flavor: Google' "$METADATA/computeMetadata/v1/instance/preempted") == TRUE ]]
}

# Wait for the notice, then stop the command and tell this shell, whose process this is a child of.
watch() {
  trap 'kill "$nap" 2>/dev/null; exit' TERM
  nap=
  until noticed; do
    sleep "$EVERY" &
    nap=$!
    wait "$nap"
  done
  echo "this machine will be taken away: stopping the node" >&2
  kill -USR1 $$
  kill -TERM "$1" 2>/dev/null
}

given=
trap 'given=1' USR1
"$@" &
command=$!
trap 'kill -TERM "$command" 2>/dev/null' TERM INT
watch "$command" &
watcher=$!

while :; do # a signal ends a wait before the command has ended
  wait "$command"
  code=$?
  kill -0 "$command" 2>/dev/null || break
done
wait "$command" # it may have ended while a signal was being handled; 127 where its status has been taken already
again=$?
((again == 127)) || code=$again
kill "$watcher" 2>/dev/null
wait "$watcher" 2>/dev/null
[[ -z $given ]] || exit 143
exit "$code"
