#!/usr/bin/env bash
# Prints the command that serves a run's target and head in SGLang, with the best tree that was measured.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
print_command sglang "$@"
