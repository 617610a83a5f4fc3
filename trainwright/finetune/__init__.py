"""Data for fine-tuning language models: conversations to tokens, and the audit of what they supervise."""
