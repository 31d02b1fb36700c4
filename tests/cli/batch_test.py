#!/usr/bin/env python3
"""batch from outside: bad lines, kill -9 and --resume, shards, full disks, and a parent process that drives a stream.

Usage: batch_test.py BINARY [MODEL]. Everything runs on the hash model (--device sim); with a model file a few lines run on it, too.
"""
import hashlib
import json
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BINARY = Path(sys.argv[1]).absolute()
MODEL = next((Path(p).absolute() for p in [*sys.argv[2:3], os.environ.get("KVW_MODEL") or "",
                                           "models/SmolLM2-135M-Instruct.Q4_1.gguf"] if p and Path(p).is_file()), None)
HERE = Path(tempfile.mkdtemp(prefix="kvwitness-batch-"))
ENV = {k: v for k, v in os.environ.items() if not k.startswith(("KVW", "XDG_", "NO_COLOR"))}
ENV.update(HOME=str(HERE / "home"), LC_ALL="C.UTF-8", TERM="dumb", TMPDIR=str(HERE / "tmp"))
ENV.update({f"XDG_{n.upper()}_HOME": str(HERE / "xdg" / n) for n in ("data", "state", "cache", "config")})
for name in ("home", "tmp", "cwd"):
    (HERE / name).mkdir()
SIM = ["--device", "sim", "-c", "2048", "--template", "chatml"]
COUNT = iter(range(10**9))


def new(name):
    return HERE / f"{next(COUNT)}-{name}"


def kvw(*args, stdin=None, env=None, **kw):
    return subprocess.run([str(BINARY), *map(str, args)], input=stdin, stdin=subprocess.DEVNULL if stdin is None else None,
                          capture_output=True, env={**ENV, **(env or {})}, cwd=HERE / "cwd", timeout=600, **kw)


def start(*args, **kw):
    return subprocess.Popen([str(BINARY), *map(str, args)], env=ENV, cwd=HERE / "cwd", **kw)


def batch(source, out, *args, device=SIM, **kw):
    return kvw("batch", source, "-o", out, *device, *args, **kw)


def expect(ran, code):
    assert ran.returncode == code, (ran.returncode, ran.stdout[-300:], ran.stderr[-600:])
    return ran


def chat(custom_id, text, tokens=8, **more):
    body = {"model": "any", "messages": [{"role": "user", "content": text}], "max_tokens": tokens}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": {**body, **more.pop("body", {})}, **more}


def raw(custom_id, text, tokens=8, **more):
    body = {"prompt": text, "max_tokens": tokens}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {**body, **more.pop("body", {})}, **more}


def lines_of(data):
    return [json.loads(line) for line in data.splitlines()]


def comparable(data, cached=True):
    """Output lines without the moment; with tenants, what was cached depends on the run, too."""
    lines = lines_of(data)
    for line in lines:
        assert set(line) == {"id", "custom_id", "response", "error", "kvwitness"}, line
        line["kvwitness"].pop("moment")
        if not cached and line["response"] and line["response"]["body"]:
            line["response"]["body"]["usage"].pop("prompt_tokens_details")
    return lines


def write_lines(path, lines):
    path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    return path


def answers(line):
    choice = line["response"]["body"]["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


TESTS = []


def test(f):
    TESTS.append(f)
    return f


# ---- lines


def nasty_input():
    """200 lines as bytes, and for each what must become of it: a code, or None for an answer."""
    def encoded(line):
        return json.dumps(line, ensure_ascii=False).encode()
    kinds = [
        lambda i: (encoded(raw(f"r{i}", f"prompt {i}", 4 + i % 9)), None),
        lambda i: (encoded(chat(f"c{i}", f"question {i} ñ 😀", 3 + i % 7)), None),
        lambda i: (encoded(raw(f"crlf{i}", "x")) + b"\r", None),
        lambda i: (b"{not json", "invalid_json_line"),
        lambda i: (b"", "empty_line"),
        lambda i: (b'{"custom_id":"u\xff\xfe"}', "invalid_utf8"),
        lambda i: (encoded(raw("r0", "again")), "duplicate_custom_id"),
        lambda i: (b'{"method":"POST","url":"/v1/completions","body":{"prompt":"x"}}', "missing_custom_id"),
        lambda i: (encoded({**raw("x", "x"), "custom_id": i}), "invalid_custom_id"),
        lambda i: (encoded(raw(f"mb{i}", "y" * (1 << 20))), "exceed_context_size"),
        lambda i: (encoded(raw(f"over{i}", "z" * 2048, 1)), "exceed_context_size"),
        lambda i: (b'{"custom_id":"deep%d","body":' % i + b"[" * 100 + b"]" * 100 + b"}", "invalid_json_line"),
        lambda i: (encoded({**raw(f"field{i}", "x"), "priority": 1}), "unknown_field"),
        lambda i: (encoded(raw(f"body{i}", "x", body={"best_of": 2})), "unknown_field"),
        lambda i: (encoded(raw(f"tenant{i}", "x", tenant="acme")), "tenant_not_allowed"),
        lambda i: (encoded({**raw(f"get{i}", "x"), "method": "GET"}), "invalid_method"),
        lambda i: (encoded({**raw(f"url{i}", "x"), "url": "/v1/embeddings"}), "url_mismatch"),
        lambda i: (encoded(raw(f"n{i}", "x", body={"n": 2})), "unsupported_value"),
        lambda i: (encoded(chat(f"hot{i}", "x", body={"temperature": 9})), "invalid_value"),
        lambda i: (encoded(chat(f"type{i}", "x", body={"max_tokens": "many"})), "invalid_type"),
    ]
    made = [kinds[i % len(kinds)](i) for i in range(200)]
    made = [(data, None if code == "duplicate_custom_id" and i < 1 else code) for i, (data, code) in enumerate(made)]
    made[0] = (b"\xef\xbb\xbf" + made[0][0], None)
    made[-1] = (encoded(chat("last", "no line feed behind me")), None)
    return b"\n".join(data for data, _ in made), made


@test
def every_bad_line_is_one_error_line_in_its_place():
    data, made = nasty_input()
    source, out, errors, trace = new("in"), new("out"), new("errors"), new("t.kvw.zst")
    source.write_bytes(data)
    ran = expect(batch(source, out, "--errors", errors, "--trace", trace), 1)
    assert not ran.stdout and b"200 lines" in ran.stderr, ran.stderr
    lines = lines_of(out.read_bytes())
    assert len(lines) == len(made) == 200
    for number, (line, (asked, code)) in enumerate(zip(lines, made), 1):
        got = line["error"] and line["error"]["code"]
        assert got == code, (number, got, code, line)
        assert line["kvwitness"]["request_digest"] == hashlib.sha256(asked.rstrip(b"\r")).hexdigest(), number
        assert line["id"].endswith(f"_{number}") and line["kvwitness"]["online"] == "clean" and line["kvwitness"]["moment"], line
        if code is None:
            body = line["response"]["body"]
            usage = body["usage"]
            assert line["response"]["status_code"] == 200 and body["created"] == 0, line
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], line
            assert body["choices"][0]["finish_reason"] in ("stop", "length"), line
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0, line
        else:
            assert f"line {number}: " in line["error"]["message"], line
            if code == "exceed_context_size":
                assert line["response"]["status_code"] == 400 and "2048" in line["error"]["message"], line
            else:
                assert line["response"] is None, line
    assert b"yyyy" not in out.read_bytes() and b"zzzz" not in ran.stderr
    assert errors.read_bytes().splitlines() == [l for l, j in zip(out.read_bytes().splitlines(), lines) if j["error"]]
    expect(kvw("batch", "check", source, out), 0)
    counted = json.loads(expect(kvw("batch", "check", source, out, "--json"), 0).stdout)
    assert counted["paired"] == 200 and counted["failed"] == sum(1 for l in lines if l["error"]), counted
    tied = json.loads(expect(kvw("verify", trace, "--answers", out, "--input", source, "--json"), 0).stdout)
    assert tied["verdict"] == "PROVEN" and tied["answers"] == {"lines": 200, "tied": 200}, tied
    assert tied["counts"]["requests"] == 200, tied["counts"]


@test
def a_changed_output_is_found():
    source, out, trace = new("in"), new("out"), new("t.kvw.zst")
    write_lines(source, [raw("a", "one", 30), raw("b", "two", 30)])
    expect(batch(source, out, "--trace", trace, "--temp", 0), 0)
    lines = lines_of(out.read_bytes())
    lines[0]["response"]["body"], lines[1]["response"]["body"] = lines[1]["response"]["body"], lines[0]["response"]["body"]
    bad = write_lines(new("swapped"), lines)
    ran = kvw("verify", trace, "--answers", bad, "--input", source, "--json")
    assert ran.returncode == 1 and json.loads(ran.stdout)["verdict"] == "VIOLATION", ran
    lines[0]["custom_id"], lines[1]["custom_id"] = "b", "a"
    assert kvw("batch", "check", source, write_lines(new("ids"), lines)).returncode == 1
    assert kvw("batch", "check", source, write_lines(new("short"), lines[:1])).returncode == 1
    torn = new("torn")
    torn.write_bytes(out.read_bytes()[:-20])
    assert kvw("batch", "check", source, torn).returncode == 3
    expect(kvw("verify", trace, "--answers", out), 2)


@test
def files_are_protected_before_any_work():
    source = write_lines(new("in"), [raw("a", "x")])
    before = source.read_bytes()
    hard, soft = new("hard"), new("soft")
    os.link(source, hard)
    soft.symlink_to(source)
    for out in (source, hard, soft):
        for force in ([], ["--force"]):
            expect(batch(source, out, *force), 2)
            assert source.read_bytes() == before
    expect(batch(source, new("o"), "--errors", source, "--force"), 2)
    assert source.read_bytes() == before
    there = new("there")
    there.write_bytes(b"mine")
    ran = batch(source, there, "--json")
    assert ran.returncode == 2 and json.loads(ran.stdout)["error"]["code"] == "file_exists" and there.read_bytes() == b"mine", ran
    expect(batch(source, there, "--force"), 0)
    assert len(lines_of(there.read_bytes())) == 1
    expect(batch(source, new("o"), "--stream"), 2)
    expect(batch(source, "-", "--json"), 2)
    expect(batch(source, "-", "--resume"), 2)
    expect(batch(source, new("o"), "--shard", "2/2"), 2)
    expect(batch(source, new("o"), "--tenant-field", "body"), 2)
    expect(kvw("batch", source, *SIM), 2)
    expect(kvw("batch", "-o", new("o"), *SIM), 2)
    expect(batch(new("none"), new("o")), 5)
    empty = new("empty")
    empty.write_bytes(b"")
    ran = expect(batch(empty, new("o")), 3)
    assert b"empty_file" in ran.stderr
    help_text = expect(kvw("batch", "-h"), 0).stdout
    assert help_text.index(b"Examples:") < help_text.index(b"Usage:")


@test
def standard_input_and_output_serve_as_files():
    data = b"".join(json.dumps(raw(f"id{i}", "x" * (i + 1), 3 + 7 * (i % 5))).encode() + b"\n" for i in range(40))
    source, out = new("in"), new("out")
    source.write_bytes(data)
    expect(batch(source, out), 0)
    piped = expect(batch("-", "-", stdin=data), 0)
    assert comparable(piped.stdout) == comparable(out.read_bytes())
    substituted = subprocess.run(["bash", "-c", '"$0" batch <(cat "$1") -o - "${@:2}"', str(BINARY), str(source), *SIM],
                                 capture_output=True, env=ENV, timeout=60)
    assert comparable(expect(substituted, 0).stdout) == comparable(out.read_bytes())
    loose = expect(batch("-", "-", "--unordered", stdin=data), 0)
    assert sorted(map(str, comparable(loose.stdout))) == sorted(map(str, comparable(out.read_bytes())))
    summary = json.loads(expect(batch(source, new("o"), "--json", "--no-trace"), 0).stdout)
    assert summary["schema"] == "kvwitness/batch" and summary["answered"] == 40 and summary["trace"] is None, summary
    with open("/dev/full", "wb") as full:
        p = start("batch", source, "-o", "-", *SIM, stdout=full, stderr=subprocess.DEVNULL)
        assert p.wait(60) == 5
    p = start("batch", source, "-o", "-", *SIM, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    p.stdout.close()
    assert p.wait(60) == 141
    assert not list((HERE / "tmp").iterdir())


# ---- crashes


def job_input():
    rng = random.Random(4)
    lines = []
    for i in range(80):
        lines.append(raw(f"id{i}", "p" * rng.randrange(1, 90), rng.randrange(1, 1000), body={"temperature": 1}))
        if i % 9 == 4:
            lines[-1] = raw(f"id{i - 1}", "the same id")
        if i % 11 == 5:
            lines[-1]["body"]["n"] = 3
    return lines


@test
def a_job_that_is_killed_goes_on_to_the_same_file():
    source, whole = new("in"), new("whole")
    write_lines(source, job_input())
    began = time.monotonic()
    expect(batch(source, whole, "--no-trace", "-np", 2, "--ignore-eos"), 1)
    seconds = time.monotonic() - began
    expected = comparable(whole.read_bytes())
    rng, kills, jobs = random.Random(5), 0, 0
    while kills < 20:
        out, errors, traces, jobs = new("out"), new("errors"), new("traces"), jobs + 1
        traces.mkdir()
        assert jobs < 40
        flags = ["-np", 2, "--ignore-eos", "--trace-dir", traces, "--errors", errors, "--resume"]
        before = b""
        while True:
            p = start("batch", source, "-o", out, *SIM, *flags, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                code = p.wait(rng.uniform(0, seconds * 0.6))
            except subprocess.TimeoutExpired:
                p.kill()
                p.wait()
                code = None
            now = out.read_bytes() if out.exists() else b""
            # What was given out stays, but for a line that was being written.
            assert now.startswith(before[:before.rfind(b"\n") + 1]), "finished lines keep their bytes"
            before = now
            if code is not None:
                assert code == 1, code
                break
            kills += 1
        assert comparable(out.read_bytes()) == expected
        assert not Path(f"{out}.journal").exists()
        assert errors.read_bytes().splitlines() == [l for l in out.read_bytes().splitlines() if json.loads(l)["error"]]
        expect(kvw("batch", "check", source, out), 0)
        expect(batch(source, out, *flags), 1)  # finished before: nothing to do
        assert comparable(out.read_bytes()) == expected


@test
def what_was_begun_with_something_else_is_refused():
    lines = job_input()
    source, out = new("in"), new("out")
    write_lines(source, lines)
    p = start("batch", source, "-o", out, *SIM, "--no-trace", "-np", 1, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal = Path(f"{out}.journal")
    while not (journal.exists() and journal.stat().st_size) and p.poll() is None:
        time.sleep(0.01)
    p.kill(), p.wait()
    assert journal.exists()
    expect(batch(source, out), 2)  # without --resume
    reordered = write_lines(new("reordered"), lines[::-1])
    assert b"another input" in expect(batch(reordered, out, "--resume", "--no-trace"), 3).stderr
    expect(batch(source, out, "--resume", "--no-trace", "-s", 1), 3)
    expect(batch(source, out, "--resume", "--no-trace", "--shard", "0/2"), 3)
    expect(batch(source, out, "--resume", "--no-trace"), 1)
    expect(batch(reordered, out, "--resume", "--no-trace"), 3)


@test
def a_signal_ends_the_step_and_leaves_the_rest_to_a_resume():
    lines = [raw(f"id{i}", "x", 900, body={"temperature": 1}) for i in range(40)]
    source, whole = write_lines(new("in"), lines), new("whole")
    expect(batch(source, whole, "--no-trace", "--ignore-eos"), 0)
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        out, trace = new("out"), new("t.kvw.zst")
        p = start("batch", source, "-o", out, *SIM, "-np", 2, "--ignore-eos", "--trace", trace, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while p.poll() is None and not (out.exists() and out.stat().st_size):
            time.sleep(0.01)
        p.send_signal(number)
        assert p.wait(60) == code, p.stderr.read()
        assert b"--resume" in p.stderr.read() and Path(f"{out}.journal").exists()
        first = out.read_bytes()
        assert 0 < first.count(b"\n") < 40
        assert json.loads(expect(kvw("verify", trace, "--json"), 0).stdout)["verdict"] == "PROVEN"
        expect(batch(source, out, "--resume", "-np", 2, "--ignore-eos", "--trace", trace), 0)
        assert out.read_bytes().startswith(first) and comparable(out.read_bytes()) == comparable(whole.read_bytes())
        second = Path(str(trace).replace(".kvw.zst", "-r1.kvw.zst"))
        both = json.loads(expect(kvw("verify", trace, second, "--answers", out, "--input", source, "--json"), 0).stdout)
        assert both["verdict"] == "PROVEN" and both["traces"][0]["answers"]["tied"] == 40, both
        alone = json.loads(expect(kvw("verify", second, "--answers", out, "--input", source, "--json"), 6).stdout)
        assert "answers_of_other_traces" in " ".join(alone["reasons"]), alone


@test
def a_full_disk_loses_nothing_that_was_acknowledged():
    source, whole = write_lines(new("in"), job_input()), new("whole")
    expect(batch(source, whole, "--no-trace"), 1)
    size, seen = whole.stat().st_size, 0
    for share in (0.05, 0.3, 0.7, 0.99):
        out = new("out")
        limit = int(size * share)
        ran = batch(source, out, "--no-trace", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
        expect(ran, 5)
        given = out.read_bytes()
        given = given[:given.rfind(b"\n") + 1]
        seen += given.count(b"\n")
        expect(batch(source, out, "--no-trace", "--resume"), 1)
        assert out.read_bytes().startswith(given) and comparable(out.read_bytes()) == comparable(whole.read_bytes())
    assert seen > 0


@test
def shards_merge_to_the_file_of_one_run():
    source, whole, merged = new("in"), new("whole"), new("merged")
    data, _ = nasty_input()
    source.write_bytes(data)
    expect(batch(source, whole), 1)
    parts = [new(f"part{i}") for i in range(3)]
    for i, part in enumerate(parts):
        expect(batch(source, part, "--shard", f"{i}/3"), 1)
        expect(kvw("batch", "check", source, part, "--shard", f"{i}/3"), 0)
        expect(kvw("batch", "check", source, part), 1)
    expect(kvw("batch", "merge", *parts[::-1], "-o", merged), 0)
    assert comparable(merged.read_bytes()) == comparable(whole.read_bytes())
    expect(kvw("batch", "merge", *parts, "-o", merged), 2)
    expect(kvw("batch", "merge", *parts[:2], "-o", new("m")), 3)
    expect(kvw("batch", "merge", parts[0], parts[0], parts[1], "-o", new("m")), 3)
    other = new("other")
    source2 = write_lines(new("in2"), [raw("a", "x")] * 3)
    expect(batch(source2, other, "--shard", "2/3"), 1)
    expect(kvw("batch", "merge", *parts[:2], other, "-o", new("m")), 3)


@test
def tenants_share_only_with_themselves_and_answers_stay_the_same():
    prompt = "A preamble that is long enough to fill whole pages of the cache. " * 3
    lines = [raw(f"{t}{i}", prompt + str(i), 5, tenant=t) for i in range(4) for t in ("acme", "zeta")]
    source, out, apart, trace = write_lines(new("in"), lines), new("out"), new("apart"), new("t.kvw.zst")
    expect(batch(source, out, "--tenant-field", "tenant", "-np", 1, "--trace", trace, "--spot-check", "100%"), 0)
    expect(batch(source, apart, "--tenant-field", "tenant", "-np", 8, "--scope", "request"), 0)
    got = lines_of(out.read_bytes())
    cached = [l["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"] for l in got]
    assert cached[:2] == [0, 0] and all(c > 100 and c % 16 == 0 for c in cached[2:]), cached
    assert comparable(out.read_bytes(), cached=False) == comparable(apart.read_bytes(), cached=False)
    proof = json.loads(expect(kvw("verify", trace, "--answers", out, "--input", source, "--json"), 0).stdout)
    assert proof["verdict"] == "PROVEN" and proof["answers"]["tied"] == 8, proof
    strict = json.loads(expect(kvw("verify", trace, "--strict", "--json"), 1).stdout)
    assert strict["verdict"] == "VIOLATION"


@test
def spot_checks_are_made_while_serving():
    source = write_lines(new("in"), [raw(f"id{i}", "x" * (1 + i), 20) for i in range(30)])
    summary = json.loads(expect(batch(source, new("o"), "--spot-check", "100%", "--json"), 0).stdout)
    assert summary["spot_checked"] == 30, summary
    some = json.loads(expect(batch(source, new("o"), "--spot-check", "30%", "--json"), 0).stdout)
    assert 0 < some["spot_checked"] < 30, some


@test
def logprobs_come_in_both_forms():
    lines = [raw("a", "x", 5, body={"logprobs": 3}), chat("b", "x", 5, body={"logprobs": True}), raw("c", "x", 5)]
    source, out = write_lines(new("in"), lines), new("out")
    expect(batch(source, out, "--ignore-eos"), 0)
    a, b, c = [l["response"]["body"]["choices"][0]["logprobs"] for l in lines_of(out.read_bytes())]
    assert len(a["tokens"]) == len(a["token_logprobs"]) == len(a["top_logprobs"]) == len(a["text_offset"]) == 5
    assert all(1 <= len(top) <= 3 and all(v <= 0 for v in top.values()) for top in a["top_logprobs"]), a
    assert len(b["content"]) == 5 and set(b["content"][0]) == {"token", "logprob", "bytes", "top_logprobs"}, b
    assert c is None


# ---- streams


class Parent:
    """Drives a stream as any parent process would."""

    def __init__(self, *args):
        self.trace = new("t.kvw.zst")
        self.p = start("batch", "--stream", "-", "-o", "-", *SIM, "--trace", self.trace, *args,
                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.buffer = b""

    def say(self, *lines):
        self.p.stdin.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        self.p.stdin.flush()

    def hear(self, seconds=60):
        """The next answer; None when there is none in time, or no more."""
        until = time.monotonic() + seconds
        while b"\n" not in self.buffer:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self.p.stdout], [], [], left)[0]:
                return None
            data = os.read(self.p.stdout.fileno(), 1 << 16)
            if not data:
                return None
            self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        return json.loads(line)

    def end(self, code):
        try:
            self.p.stdin.close()
        except BrokenPipeError:
            pass
        assert self.p.wait(120) == code, (self.p.returncode, self.p.stderr.read())
        return self.proof()

    def proof(self):
        ran = kvw("verify", self.trace, "--json")
        return json.loads(ran.stdout)


@test
def a_parent_drives_three_tenants_and_nothing_is_mixed():
    rng = random.Random(8)
    # What each request gets alone, from a run of its own.
    asked = {}
    for i in range(90):
        tenant = ("ant", "bee", "cat")[i % 3]
        asked[f"{tenant}-{i}"] = raw(f"{tenant}-{i}", f"{tenant} says {i} " * rng.randrange(1, 12), rng.randrange(1, 120),
                                     tenant=tenant, body={"temperature": 1, "seed": i})
    source, alone = write_lines(new("in"), asked.values()), new("alone")
    expect(batch(source, alone, "--tenant-field", "tenant", "--scope", "request", "-np", 1, "--no-trace"), 0)
    expected = {line["custom_id"]: answers(line) for line in lines_of(alone.read_bytes())}

    parent = Parent("--tenant-field", "tenant", "-np", 8)
    waiting, ended, cancelled = list(asked), {}, set()
    while len(ended) < len(asked):
        for custom_id in waiting[:rng.randrange(1, 9)]:
            waiting.remove(custom_id)
            parent.say(asked[custom_id])
            if rng.random() < 0.2:
                cancelled.add(custom_id)
                parent.say({"cancel": custom_id})
        while (line := parent.hear(60 if not waiting else 0.02)) is not None:
            assert line["custom_id"] not in ended, line["custom_id"]
            ended[line["custom_id"]] = line
            if not waiting and len(ended) == len(asked):
                break
    for custom_id, line in ended.items():
        assert line["kvwitness"]["request_digest"] == hashlib.sha256(json.dumps(asked[custom_id]).encode()).hexdigest()
        status = line["response"]["status_code"]
        if status == 499:
            assert custom_id in cancelled and line["error"]["code"] == "cancelled", line
        else:
            assert status == 200 and answers(line) == expected[custom_id], line
    assert sum(line["error"] is not None for line in ended.values()) > 0
    assert parent.hear(0.2) is None
    proof = parent.end(0 if not any(l["error"] for l in ended.values()) else 1)
    assert proof["verdict"] == "PROVEN" and proof["counts"]["requests"] == 90 and proof["counts"]["tenants"] == 3, proof
    expect(kvw("replay", parent.trace, "--device", "sim", "--solo", "20%"), 0)


@test
def answers_come_while_the_input_is_open():
    parent = Parent()
    parent.say(raw("a", "x", 3))
    assert parent.hear()["custom_id"] == "a"
    parent.p.stdin.write(b"rubbish\n")
    parent.say(raw("a", "x", 3), raw("b", "x", 2))
    codes = {line["id"].rsplit("_", 1)[1]: line["error"] and line["error"]["code"] for line in (parent.hear(), parent.hear(), parent.hear())}
    assert codes == {"2": "invalid_json_line", "3": "duplicate_custom_id", "4": None}, codes
    assert parent.end(1)["verdict"] == "PROVEN"


@test
def a_parent_that_leaves_ends_everything():
    for early in (True, False):
        parent = Parent("-np", 4)
        parent.say(*[raw(f"id{i}", "x", 1900, body={"temperature": 1}) for i in range(12)])
        if not early:
            parent.say(raw("short", "x", 1))
            parent.hear()
        parent.p.stdout.close()
        assert parent.p.wait(60) == 141, parent.p.stderr.read()  # although its input is still open
        proof = parent.proof()
        assert proof["verdict"] in ("PROVEN", "UNPROVEN") and not proof["violations"] and proof["trace"]["closed"], proof
        events = lines_of(kvw("trace", "dump", parent.trace, "--jsonl").stdout)
        submitted = [e["request"] for e in events if e["type"] == "submit"]
        finished = [e["request"] for e in events if e["type"] in ("finish", "reject")]
        assert sorted(submitted) == sorted(finished) and len(set(finished)) == len(finished)


@test
def a_signal_ends_every_stream_once():
    parent = Parent("-np", 3)
    ids = [f"id{i}" for i in range(10)]
    parent.say(*[raw(i, "x", 1900, body={"temperature": 1}) for i in ids])
    time.sleep(0.3)
    parent.p.send_signal(signal.SIGTERM)
    ended = []
    while (line := parent.hear()) is not None:
        ended.append(line["custom_id"])
    assert parent.p.wait(60) == 143
    assert len(set(ended)) == len(ended) and set(ended) <= set(ids), ended
    assert parent.proof()["trace"]["closed"]


@test
def the_model_answers_chats_as_it_does_alone():
    if MODEL is None:
        print("left out, no model: the_model_answers_chats_as_it_does_alone")
        return
    device = ["-m", MODEL, "-c", "512"]
    lines = [chat(f"id{i}", text, 12, body={"temperature": 0}) for i, text in enumerate(["Hello!", "What is 2 + 2?", "Name a colour."])]
    source, out, trace = write_lines(new("in"), lines), new("out"), new("t.kvw.zst")
    expect(batch(source, out, "--trace", trace, "--spot-check", "100%", device=device), 0)
    for line, asked in zip(lines_of(out.read_bytes()), lines):
        prompt = asked["body"]["messages"][0]["content"]
        alone = json.loads(expect(kvw("run", *device, prompt, "-n", 12, "--temp", 0, "--no-trace", "--json"), 0).stdout)
        assert answers(line) == alone["text"], (line, alone)
        assert line["response"]["body"]["usage"]["prompt_tokens"] == alone["prompt_tokens"]
    proof = json.loads(expect(kvw("verify", trace, "--answers", out, "--input", source, "--json"), 0).stdout)
    assert proof["verdict"] == "PROVEN" and proof["answers"]["tied"] == 3, proof


def main():
    failed = 0
    only = sys.argv[3:]
    try:
        for f in TESTS:
            if only and f.__name__ not in only:
                continue
            began = time.monotonic()
            try:
                f()
                print(f"ok {f.__name__} ({time.monotonic() - began:.1f} s)", flush=True)
            except (AssertionError, KeyError, IndexError, TypeError, ValueError, OSError, subprocess.TimeoutExpired) as problem:
                failed += 1
                line = problem.__traceback__.tb_next.tb_lineno if problem.__traceback__.tb_next else 0
                print(f"NOT OK {f.__name__}, line {line}: {type(problem).__name__}: {str(problem)[:900]}", flush=True)
    finally:
        shutil.rmtree(HERE, ignore_errors=True)
    print(f"{len(TESTS)} tests, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
