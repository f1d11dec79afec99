#!/bin/sh
# Starts a skyrl server as a job of a Ray cluster whose nodes have skyrl installed. docs/howto/cluster.md has what the
# nodes need. Run it where the dashboard's port answers, for example through
#   ssh -N -L 8265:127.0.0.1:8265 head.example.org
# Secrets are variables of the head's own environment (SKYRL_DATABASE_URL, AWS_SECRET_ACCESS_KEY): a job's description, its
# environment included, is shown to everybody who reaches the dashboard.
set -eu
cd "$(dirname "$0")"
exec ray job submit \
    --address "${RAY_DASHBOARD:-http://127.0.0.1:8265}" \
    --submission-id "${1:-skyrl}" \
    --runtime-env runtime-env.yaml \
    --no-wait \
    -- skyrl serve --config three-nodes.toml
