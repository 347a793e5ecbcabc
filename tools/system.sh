#!/usr/bin/env bash
# Installs the Debian packages that building and testing need, and only those that are missing.
# Run by the Makefile with the Python in use as its first argument; silent when there is nothing to do. With "tests" as
# its second one it installs what some tests want, and without which they are skipped.
set -euo pipefail

python="$1"
missing=()
command -v g++ >/dev/null || missing+=(g++)
command -v git >/dev/null || missing+=(git)
[ -e /usr/include/liburing.h ] || missing+=(liburing-dev)
[ -e /usr/include/xxhash.h ] || missing+=(libxxhash-dev)
[ -n "$(find /usr/lib -name 'libibverbs.so.1' -print -quit)" ] || missing+=(libibverbs1)
command -v nft >/dev/null || [ -x /usr/sbin/nft ] || missing+=(nftables)
if [ "${2:-}" = tests ]; then
    command -v chromium >/dev/null || missing+=(chromium)
    command -v redis-server >/dev/null || missing+=(redis-server)
    command -v clang++ >/dev/null || missing+=(clang)
    [ -n "$(find /usr/lib/llvm* -name 'libclang_rt.fuzzer-*.a' -print -quit 2>/dev/null)" ] || missing+=(libclang-rt-dev)
fi
if ! command -v "$python" >/dev/null; then
    missing+=(python3 python3-venv)
elif ! "$python" -c ''; then
    echo "$python does not run: set PYTHON=... to one that does (3.10 or newer)." >&2
    exit 1
elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    # A Debian Python splits venv off; its package carries the version in its name.
    missing+=("$("$python" -c 'import sys; print(f"python{sys.version_info[0]}.{sys.version_info[1]}-venv")')")
fi
[ ${#missing[@]} -eq 0 ] && exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || {
        echo "Missing: ${missing[*]}. Neither root nor sudo here: install them and run make again." >&2
        exit 1
    }
    as_root=(sudo)
fi
command -v apt-get >/dev/null || {
    echo "Missing: ${missing[*]} (Debian's names). There is no apt-get here: install them and run make again." >&2
    exit 1
}
echo "Installing with apt-get: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { "${as_root[@]}" apt-get update -q && "${as_root[@]}" apt-get install -qy --no-install-recommends "${missing[@]}"; } \
    </dev/null >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "apt-get could not install: ${missing[*]}. Install them by hand and run make again." >&2
    exit 1
fi
