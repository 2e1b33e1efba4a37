#!/usr/bin/env bash
# Streams an answer without drafts and with them, from an empty clone, in minutes on two CPU cores:
#
#     bash tools/hello.sh                                  # drafts of the head that comes with the package
#     bash tools/hello.sh --draft lookup                   # copied from the text, without a head
#     bash tools/hello.sh --draft runs/quickstart/export   # drafts of a head
#
# Installs the requirements of decoding alone, on a TPU VM those of TPUs, and runs tools/hello.py.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

if has_tpu; then
  prepare_environment tpu
else
  prepare_environment decode "" train "test[reference]"
fi
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then exec "$VENV/bin/python" tools/hello.py --help; fi
"$VENV/bin/python" tools/hello.py "$@" || fail "did not finish; what it said stands above."
[[ " $* " == *" -h "* || " $* " == *" --help "* ]] && exit
printf 'Done in %d:%02d. To train a head: bash tools/quickstart.sh\n' $((SECONDS / 60)) $((SECONDS % 60))
