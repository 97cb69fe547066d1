#!/bin/sh
# Builds the five wheels, then installs each alone (with what it declares) and uses it there, so
# that a dependency which only the shared workspace provides is found.
set -eu
python=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
for package in "$root"/packages/* "$root"; do
  # A copy, so that a stale build folder of the checkout supplies nothing; links are followed, as
  # they are in a source distribution.
  rm -rf "$tmp/src" && mkdir "$tmp/src"
  (cd "$package" && git ls-files -z . | tar --null -hcf - -T -) | tar -C "$tmp/src" -xf -
  "$python" -m pip wheel -q --disable-pip-version-check --no-deps -w "$tmp/wheels" "$tmp/src"
done
try() {
  name=$1; shift
  echo "-- $name alone"
  "$python" -m venv "$tmp/venv"
  "$tmp/venv/bin/python" -m pip install -q --disable-pip-version-check -c "$root/constraints.txt" \
    --find-links "$tmp/wheels" "$name"
  for command in "$@"; do
    (cd "$tmp" && PATH="$tmp/venv/bin:$PATH" sh -euc "$command")
  done
  rm -rf "$tmp/venv"
}
demo="$root/packages/colibri-bench/src/colibri_bench/data/hummingbird-21m-moe.q8_0.gguf"
try colibri-format 'python -c "import colibri_format as f; print(len(f.DTYPES), \"dtypes\")"' \
  'test -f "$(python -c "import colibri_format as f; print(f.get_include())")/colibri.h"'
try colibri-repack 'python -c "from colibri_repack.recode import engine_name as e; print(e())" | grep "^C "' \
  "colibri-repack '$demo' demo.colibri --force > /dev/null" \
  'colibri-inspect demo.colibri | head -3' 'colibri-verify demo.colibri > /dev/null'
try colibri-runtime 'colibri-run demo.colibri --prompt "Once upon a time" --memory 32M --max-tokens 8'
try colibri-bench 'colibri-demo > demo.txt' 'tail -3 demo.txt'
try colibri-toolkit 'colibri --version' 'colibri --help' 'colibri inspect demo.colibri > /dev/null'
