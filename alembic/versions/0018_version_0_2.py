"""the schema of version 0.2.0

Revision: 0018
"""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

revision = "0018"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "adapter_uses",
        sa.Column("weights", sa.Text(), nullable=False),
        sa.Column("used_until", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("weights"),
    )
    op.create_table(
        "agent_sessions",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("weights", sa.Text(), nullable=False),
        sa.Column("follows", sa.String(), nullable=False),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("used_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("end_reason", sa.String(), nullable=True),
        sa.Column("reward", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_agent_sessions_ended_at", "agent_sessions", ["ended_at"], unique=False)
    op.create_index(
        "ix_agent_sessions_open",
        "agent_sessions",
        ["tenant"],
        unique=False,
        sqlite_where=sa.text("ended_at IS NULL"),
        postgresql_where=sa.text("ended_at IS NULL"),
    )
    op.create_index("ix_agent_sessions_tenant", "agent_sessions", ["tenant", "created_at"], unique=False)
    op.create_table(
        "agent_turns",
        sa.Column("n", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("parent", sa.String(), nullable=True),
        sa.Column("key", sa.LargeBinary(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=False),
        sa.Column("added", sa.Integer(), nullable=False),
        sa.Column("sampled", sa.Integer(), nullable=False),
        sa.Column("fork", sa.String(), nullable=True),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("n"),
        sa.UniqueConstraint("session_id", "key", "attempt"),
    )
    op.create_index(op.f("ix_agent_turns_session_id"), "agent_turns", ["session_id"], unique=False)
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.Column("revoked_at", sa.Float(), nullable=True),
        sa.Column("last_used_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_api_keys_tenant"), "api_keys", ["tenant"], unique=False)
    op.create_table(
        "api_processes",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("heartbeat_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "audit_events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_audit_events_tenant_at", "audit_events", ["tenant", "at"], unique=False)
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("store_key", sa.String(), nullable=True),
        sa.Column("weights", sa.Text(), nullable=True),
        sa.Column("old_directory", sa.String(), nullable=True),
        sa.Column("copy_key", sa.String(), nullable=True),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("lora_rank", sa.Integer(), nullable=False),
        sa.Column("lora_alpha", sa.Float(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("train_attn", sa.Boolean(), nullable=False),
        sa.Column("train_mlp", sa.Boolean(), nullable=False),
        sa.Column("train_unembed", sa.Boolean(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("public", sa.Boolean(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("model_id", "kind", "name"),
    )
    op.create_index(op.f("ix_checkpoints_copy_key"), "checkpoints", ["copy_key"], unique=True)
    op.create_index(op.f("ix_checkpoints_expires_at"), "checkpoints", ["expires_at"], unique=False)
    op.create_index(op.f("ix_checkpoints_tenant"), "checkpoints", ["tenant"], unique=False)
    op.create_index(op.f("ix_checkpoints_weights"), "checkpoints", ["weights"], unique=False)
    op.create_table(
        "engine_state",
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("inference_proxy_url", sa.String(), nullable=True),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("training_ready", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("vocab_size", sa.Integer(), nullable=True),
        sa.Column("max_context", sa.Integer(), nullable=True),
        sa.Column("heartbeat_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.Column("state_dir", sa.String(), nullable=True),
        sa.Column("activity", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("base_model"),
    )
    op.create_table(
        "futures",
        sa.Column("n", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("model_id", sa.String(), nullable=True),
        sa.Column("seq_id", sa.BigInteger(), nullable=True),
        sa.Column("sampling_session_id", sa.String(), nullable=True),
        sa.Column("sample_seq_id", sa.BigInteger(), nullable=True),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=True),
        sa.Column("body_format", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("result", sa.LargeBinary(), nullable=True),
        sa.Column("result_format", sa.String(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("error_category", sa.String(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("completed_at", sa.Float(), nullable=True),
        sa.Column("owner", sa.String(), nullable=True),
        sa.Column("not_before", sa.Float(), nullable=True),
        sa.Column("trace", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("n"),
        sa.UniqueConstraint("id"),
        sa.UniqueConstraint("model_id", "seq_id"),
        sa.UniqueConstraint("sampling_session_id", "sample_seq_id"),
    )
    op.create_index(op.f("ix_futures_completed_at"), "futures", ["completed_at"], unique=False)
    op.create_index(op.f("ix_futures_session_id"), "futures", ["session_id"], unique=False)
    op.create_index("ix_futures_status_n", "futures", ["status", "n"], unique=False)
    op.create_table(
        "inference_servers",
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("url", sa.String(), nullable=True),
        sa.Column("node", sa.String(), nullable=True),
        sa.Column("incarnation", sa.String(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.Column("sidecar_url", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("owner", "name"),
    )
    op.create_table(
        "meters",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("counted_until", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "picture_uses",
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "digest", "request_id"),
    )
    op.create_index("ix_picture_uses_created_at", "picture_uses", ["created_at"], unique=False)
    op.create_table(
        "pictures",
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("format", sa.String(), nullable=False),
        sa.Column("width", sa.Integer(), nullable=False),
        sa.Column("height", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("last_used_at", sa.Float(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "digest"),
    )
    op.create_index("ix_pictures_last_used_at", "pictures", ["last_used_at", "size_bytes"], unique=False)
    op.create_table(
        "quotas",
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("requests_in_flight", sa.Integer(), nullable=True),
        sa.Column("tokens_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("models", sa.Integer(), nullable=True),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=True),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("tenant"),
    )
    op.create_table(
        "run_steps",
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("passes", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("loss_sum", sa.Float(), nullable=False),
        sa.Column("loss_weight", sa.Float(), server_default="0", nullable=False),
        sa.Column("gap_sum", sa.Float(), nullable=False),
        sa.Column("gap_tokens", sa.BigInteger(), nullable=False),
        sa.Column("clipped_sum", sa.Float(), nullable=False),
        sa.Column("clipped_tokens", sa.BigInteger(), nullable=False),
        sa.Column("ratio_sum", sa.Float(), server_default="0", nullable=False),
        sa.Column("ratio_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("learning_rate", sa.Float(), nullable=True),
        sa.Column("busy_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("model_id", "step"),
    )
    op.create_index("ix_run_steps_updated_at", "run_steps", ["updated_at"], unique=False)
    op.create_table(
        "sample_clocks",
        sa.Column("process_id", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("clock", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("process_id", "base_model"),
    )
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("heartbeat_at", sa.Float(), nullable=False),
        sa.Column("finish_reason", sa.String(), nullable=True),
        sa.Column("finish_detail", sa.Text(), nullable=True),
        sa.Column("sdk_version", sa.String(), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("project_id", sa.String(), nullable=True),
        sa.Column("display_name", sa.String(), nullable=True),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_sessions_status"), "sessions", ["status"], unique=False)
    op.create_index(op.f("ix_sessions_tenant"), "sessions", ["tenant"], unique=False)
    # After ix_sessions_tenant: of two indexes that serve a query equally well, SQLite takes the newer.
    op.create_index(
        "ix_sessions_active_tenant",
        "sessions",
        ["tenant"],
        unique=False,
        sqlite_where=sa.text("status = 'active'"),
        postgresql_where=sa.text("status = 'active'"),
    )
    op.create_table(
        "stores",
        sa.Column("url", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("url"),
    )
    op.create_table(
        "training_claim",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(), nullable=True),
        sa.Column("held_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "usage",
        sa.Column("bucket", sa.BigInteger(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("amount", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "bucket", "session_id", "model_id", "base_model", "kind"),
    )
    op.create_index("ix_usage_bucket", "usage", ["bucket"], unique=False)
    op.create_table(
        "models",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("model_seq_id", sa.Integer(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("lora_rank", sa.Integer(), nullable=False),
        sa.Column("lora_alpha", sa.Float(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("train_attn", sa.Boolean(), nullable=False),
        sa.Column("train_mlp", sa.Boolean(), nullable=False),
        sa.Column("train_unembed", sa.Boolean(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("sampler_version", sa.Integer(), nullable=False),
        sa.Column("versions_taken", sa.Integer(), server_default="0", nullable=False),
        sa.Column("next_seq", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("last_request_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["session_id"],
            ["sessions.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_models_session_id"), "models", ["session_id"], unique=False)
    op.create_index(op.f("ix_models_status"), "models", ["status"], unique=False)
    op.create_index(op.f("ix_models_tenant"), "models", ["tenant"], unique=False)
    op.create_table(
        "sampling_sessions",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("seq_id", sa.Integer(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("model_path", sa.String(), nullable=True),
        sa.Column("weights", sa.Text(), server_default="base", nullable=False),
        sa.Column("old_directory", sa.String(), nullable=True),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("clones", sa.Integer(), server_default="0", nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=True),
        sa.Column("last_used_at", sa.Float(), nullable=True),
        sa.Column("closed_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(
            ["session_id"],
            ["sessions.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("session_id", "seq_id"),
    )
    op.create_index(
        "ix_sampling_sessions_closed_at",
        "sampling_sessions",
        ["closed_at"],
        unique=False,
        sqlite_where=sa.text("closed_at IS NOT NULL"),
        postgresql_where=sa.text("closed_at IS NOT NULL"),
    )
    op.create_index(
        "ix_sampling_sessions_idle",
        "sampling_sessions",
        ["last_used_at", "weights"],
        unique=False,
        sqlite_where=sa.text("status = 'active' AND weights <> 'base'"),
        postgresql_where=sa.text("status = 'active' AND weights <> 'base'"),
    )
    op.create_index(
        "ix_sampling_sessions_open",
        "sampling_sessions",
        ["session_id"],
        unique=False,
        sqlite_where=sa.text("status = 'active'"),
        postgresql_where=sa.text("status = 'active'"),
    )
    op.create_index(op.f("ix_sampling_sessions_session_id"), "sampling_sessions", ["session_id"], unique=False)
    op.create_index(op.f("ix_sampling_sessions_weights"), "sampling_sessions", ["weights"], unique=False)
