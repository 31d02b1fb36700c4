#!/usr/bin/env python3
"""read_trace.py and the C++ reader say the same of the same files; read_trace.py sees every changed byte.

    read_trace_test.py TRACE_SAMPLE
"""
import json
import os
import random
import subprocess
import sys
import tempfile

READER = os.path.join(os.path.dirname(os.path.realpath(__file__)), "read_trace.py")


def lines(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.returncode} {done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def main(sample):
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sample, "write", folder], check=True)
        for name in ("closed", "open"):
            path = f"{folder}/{name}.kvw.zst"
            here, there = lines(sys.executable, READER, path, "--texts"), lines(sample, "show", path)
            mine, theirs = here.pop(), there.pop()
            assert len(here) > 5000 and mine["chunks"] >= 1, mine
            assert mine["tail_rows"] > 0 or name == "closed", mine
            for a, b in zip(here, there):
                assert a == b, f"{name}: {a} is {b} in C++"
            assert len(here) == len(there)
            for key in ("end", "events", "ledger_digest"):
                assert mine[key] == theirs[key], f"{name}: {key} {mine[key]} is {theirs[key]} in C++"
            assert name == "open" or mine["root"] == theirs["root"]
            assert mine["unknown_critical"] == 0

        # A trace of version 1.0: what it did not know is 0.
        old = os.path.join(os.path.dirname(READER), "..", "data", "record_1_0.kvw.zst")
        here, there = lines(sys.executable, READER, old)[:-1], lines(sample, "show", old)[:-1]
        assert here == there and len(here) == 100
        assert all(event["scope"] == 0 for event in here if event["kind"] == "submit")

        with open(f"{folder}/closed.kvw.zst", "rb") as file:
            whole = file.read()
        rng = random.Random(1)
        for _ in range(20):
            changed = bytearray(whole)
            changed[rng.randrange(len(whole))] ^= rng.randrange(1, 256)
            path = f"{folder}/changed.kvw.zst"
            with open(path, "wb") as file:
                file.write(changed)
            done = subprocess.run([sys.executable, READER, path], capture_output=True)
            assert done.returncode == 3, done.stderr
    print("the same events, texts, root and digest")


if __name__ == "__main__":
    main(sys.argv[1])
