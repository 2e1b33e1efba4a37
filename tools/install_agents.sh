#!/usr/bin/env bash
# Installs OpenAI's library for agents into .venv-agents, for tests/serve/test_calls.py. Without hashes: CONTRIBUTING.md,
# "Versions".
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

install_apart .venv-agents true openai-agents==0.24.0
