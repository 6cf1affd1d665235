#!/usr/bin/env bash
# mooncake-transfer-engine-non-cuda 0.3.13.post1 (a store over TCP on this machine): a page that is written
# again keeps its old bytes, and a question about a page keeps it from being removed.
#
# Expected: `put` of other bytes under a key that exists replaces them or fails; `remove_by_regex("page1")`
# removes page1; a page that nobody reads can be removed.
# Seen: `put` returns 0 (success) and drops the new bytes; `upsert` replaces. The expression is searched for
# anywhere in a key, so page10 goes too. `is_exist` gives a page a lease of ten seconds, and `remove` then
# fails with -706.
#
#     put again: 0, read: b'first', upsert: 0, read: b'third'
#     removed by "page1": 2, left of page1, page10, page2: [0, 0, 1]
#     remove right after the write: 0, right after is_exist: -706
# (The binaries need libibverbs1, which is fetched with apt on Debian or Ubuntu if the machine lacks it.)
set -euo pipefail
work=$(mktemp -d)
master=
trap 'test -z "$master" || kill "$master"; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1
cd "$work"
if ! ldconfig -p | grep -q libibverbs.so.1; then
    apt-get download -qq libibverbs1 libnl-3-200 libnl-route-3-200 2> apt.log || { cat apt.log; exit 1; }
    for file in *.deb; do dpkg -x "$file" libraries; done
    export LD_LIBRARY_PATH=$work/libraries/usr/lib/x86_64-linux-gnu:$work/libraries/lib/x86_64-linux-gnu
fi
read -r rpc metrics < <(python3 -c "
import socket
taken = [socket.create_server(('127.0.0.1', 0)) for _ in range(2)]
print(*(one.getsockname()[1] for one in taken))")
package=$(echo venv/lib/python3*/site-packages/mooncake)
"$package/mooncake_master" --rpc_address=127.0.0.1 --rpc_port="$rpc" --metrics_host=127.0.0.1 \
    --metrics_port="$metrics" > master.log 2>&1 &
master=$!
PORT=$rpc venv/bin/python - 2> client.log <<'PY' || { tail -n 5 client.log; exit 1; }
import os
import time
from mooncake.store import MooncakeDistributedStore

address = "127.0.0.1:" + os.environ["PORT"]
for _ in range(20):
    store = MooncakeDistributedStore()
    if store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", address) == 0:
        break
    time.sleep(1)
assert store.put("page", b"first") == 0
again, read = store.put("page", b"other"), store.get("page")
replaced, third = store.upsert("page", b"third"), store.get("page")
print(f"put again: {again}, read: {read}, upsert: {replaced}, read: {third}", flush=True)
for key in "page1", "page10", "page2":
    store.put(key, b"data")
removed = store.remove_by_regex("page1")
left = [store.is_exist(key) for key in ("page1", "page10", "page2")]
print(f'removed by "page1": {removed}, left of page1, page10, page2: {left}', flush=True)
store.put("other", b"data")
free = store.remove("other")
store.put("other", b"data")
assert store.is_exist("other") == 1
leased = store.remove("other")
print(f"remove right after the write: {free}, right after is_exist: {leased}", flush=True)
seen = (again, read, third, removed, left, free, leased)
assert seen == (0, b"first", b"third", 2, [0, 0, 1], 0, -706), "the behaviour has changed"
store.close()
PY
