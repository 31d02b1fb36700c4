#!/usr/bin/env python3
"""The command line, driven from outside: exit codes, one JSON object on every exit path, streams, traces, places.

Usage: cli_test.py BINARY [MODEL]. Without a model file the checks that need one are left out, and that is said.
"""
import base64
import json
import os
import pty
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BINARY = Path(sys.argv[1]).absolute()
MODEL = next((Path(p).absolute() for p in [*sys.argv[2:3], os.environ.get("KVW_MODEL") or "",
                                           "models/SmolLM2-135M-Instruct.Q4_1.gguf"] if p and Path(p).is_file()), None)
HERE = Path(tempfile.mkdtemp(prefix="kvwitness-cli-"))
ENV = {k: v for k, v in os.environ.items() if not k.startswith(("KVW", "XDG_", "NO_COLOR"))}
ENV.update(HOME=str(HERE / "home"), LC_ALL="C.UTF-8", TERM="dumb", TMPDIR=str(HERE / "tmp"))
ENV.update({f"XDG_{n.upper()}_HOME": str(HERE / "xdg" / n) for n in ("data", "state", "cache")})
for name in ("home", "tmp", "cwd"):
    (HERE / name).mkdir()


class Ran:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err
        try:
            self.json = json.loads(out)
        except ValueError:
            self.json = None

    def __repr__(self):
        return f"exit {self.code}, stdout {self.out[:200]!r}, stderr {self.err[-200:]!r}"


def kvw(*args, stdin=None, env=None, stdout=subprocess.PIPE):
    p = subprocess.run([str(BINARY), *map(str, args)], input=stdin, stdin=subprocess.DEVNULL if stdin is None else None,
                       stdout=stdout, stderr=subprocess.PIPE, env={**ENV, **(env or {})}, cwd=HERE / "cwd", timeout=300)
    return Ran(p.returncode, p.stdout or b"", p.stderr)


def one_object(ran, code, error=None):
    """The exit's one JSON object, with the shape every object has."""
    assert ran.code == code, ran
    assert isinstance(ran.json, dict) and ran.out.count(b"\n") == 1, ran
    assert ran.json["schema"].startswith("kvwitness/") and ran.json["v"] == 1, ran
    if error:
        assert ran.json["error"]["code"] == error and ran.json["error"]["exit"] == code, ran
        assert ran.json["error"]["message"], ran
    return ran.json


def lines_of(data):
    return [json.loads(line) for line in data.splitlines() if line.strip()]


def run(*args, **kw):
    return kvw("run", "-m", MODEL, "--raw", *args, **kw)


TESTS = []


def test(needs_model=False):
    def keep(f):
        TESTS.append((f, needs_model))
        return f
    return keep


# ---- without a model


@test()
def version_says_what_was_built():
    v = one_object(kvw("--version", "--json"), 0)
    assert v["schema"] == "kvwitness/version" and v["network"] == "none" and "ref" in v["isa"], v
    assert re.fullmatch(rb"kvwitness \d+\.\d+\.\d+\n", kvw("--version").out)


@test()
def every_command_has_help_with_examples_first():
    for command in ("run", "verify", "replay", "trace ls", "trace show", "trace dump", "trace prune", "trace rm", "model info",
                    "model check", "model tokenize", "bench", "bench verify", "bench limits", "completion", "help"):
        ran = kvw(*command.split(), "--help")
        assert ran.code == 0 and ran.out.index(b"Examples:") < ran.out.index(b"Usage:"), (command, ran)
        assert ran.out == kvw("help", *command.split()).out, command
    assert b"KVW_MODEL" in kvw("run", "-h").out


@test()
def a_mistyped_word_is_an_error_with_a_hint():
    assert one_object(kvw("rum", "--json"), 2, "usage")["error"]["message"].endswith("Did you mean 'run'?")
    message = one_object(kvw("run", "-p", "a", "--ignore-eso", "--json"), 2, "usage")["error"]["message"]
    assert "'--ignore-eos'" in message, message
    one_object(kvw("run", "-p", "a", "--ignore-e", "--json"), 2, "usage")  # no prefix of a flag
    one_object(kvw("trace", "lss", "--json"), 2, "usage")
    one_object(kvw("--json"), 2, "usage")
    assert b"secret" not in kvw("run", "a", "secret", "words").err


@test()
def numbers_are_read_strictly():
    for flag, values in {"-n": ["many", "", "-1", "0", "1e3", "4294967296", "99999999999999999999", " 5", "5x"],
                         "--temp": ["-3", "nan", "inf", "1e308", "hot", ""], "--top-p": ["1.5", "-0.1"], "-t": ["0", "1.5"],
                         "-s": ["-2", "18446744073709551616"], "--top-k": ["-1"], "-ub": ["0"], "-c": ["x"]}.items():
        for value in values:
            ran = kvw("run", "-p", "a", flag, value, "--json")
            one_object(ran, 2, "usage")
    assert "KVW_TOKENS" in one_object(kvw("run", "-p", "a", "--json", env={"KVW_TOKENS": "many"}), 2, "usage")["error"]["message"]
    one_object(kvw("run", "-p", "a", "--text", "encrypted", "--json"), 2, "usage")
    one_object(kvw("verify", "x", "--require", "most", "--json"), 2, "usage")


@test()
def files_that_are_not_there_or_not_what_they_should_be():
    text = HERE / "text"
    text.write_text("hello" * 99)
    for args, codes in {("run", "-m", HERE / "none", "-p", "a"): (5, "io"), ("run", "-m", text, "-p", "a"): (3, "bad_model"),
                        ("model", "info", text): (3, "bad_model"), ("verify", text): (3, "bad_trace"),
                        ("verify", HERE / "none"): (5, "io"), ("trace", "show", text): (3, "bad_trace"),
                        ("replay", HERE / "none", "-m", text): None, ("verify", "@latest"): (5, "io"),
                        ("run", "-p", "a"): (2, "usage"), ("run", "-m", text, "-p", "a", "--device", "cuda"): (5, "no_device"),
                        ("run", "-m", text, "-p", "a", "--key-dir", HERE / "none"): (5, "key_folder"),
                        ("run", "-m", text, "-p", "a", "--trace", HERE / "no/where"): (5, "io"),
                        ("run", "-m", text, "-p", "a", "--trace", text): (2, "file_exists")}.items():
        ran = kvw(*args, "--json")
        if codes:
            one_object(ran, *codes)
        else:
            assert ran.code in (3, 5), ran
    assert kvw("verify", text, "--json").json["verdict"] == "UNPROVEN"
    ran = kvw("run", "-m", "evil\x1b[31m\x07name.gguf", "-p", "a")
    assert b"\x1b" not in ran.err and b"\x07" not in ran.err, ran


@test()
def an_empty_store_is_an_empty_list():
    assert one_object(kvw("trace", "ls", "--json"), 0)["traces"] == []
    assert kvw("trace", "ls", "--jsonl").out == b""
    one_object(kvw("trace", "prune", "--json"), 2, "usage")
    one_object(kvw("trace", "prune", "--keep", "14 days", "--json"), 2, "usage")
    assert one_object(kvw("trace", "prune", "--keep", "14d", "--json"), 0)["removed"] == []


@test()
def completion_knows_commands_and_flags():
    for shell in ("bash", "zsh", "fish"):
        script = kvw("completion", shell).out.decode()
        assert "tokenize" in script and "ignore-eos" in script, shell
    script = HERE / "completion.bash"
    script.write_bytes(kvw("completion", "bash").out)
    ask = f"source {script}; COMP_WORDS=(kvwitness trace du); COMP_CWORD=2; _kvwitness; echo ${{COMPREPLY[@]}}"
    assert subprocess.run(["bash", "-c", ask], capture_output=True).stdout.split() == [b"dump"]
    one_object(kvw("completion", "tcsh", "--json"), 2, "usage")


@test()
def the_proof_can_be_measured():
    ran = one_object(kvw("bench", "verify", "--events", 20000, "-r", 1, "--json"), 0)
    assert ran["verdict"] == "PROVEN" and ran["events"] >= 20000 and ran["median_events_per_second"] > 0, ran
    assert not list((HERE / "tmp").iterdir())


SIM = ["--device", "sim", "-p", "hi", "-n", 3]


def recorded(name):
    trace = HERE / name
    one_object(kvw("run", *SIM, "--trace", trace, "--json"), 0)
    return trace


@test()
def a_name_that_is_empty_or_a_stream_is_refused_before_any_work():
    trace = recorded("streams.kvw.zst")
    (HERE / "cwd/.partial").write_bytes(trace.read_bytes())
    for name in ("", "-"):
        for args in (["run", *SIM, "--trace", name], ["verify", name], ["verify", trace, name], ["trace", "show", name],
                     ["trace", "dump", name], ["trace", "rm", name], ["replay", name, "--device", "sim"],
                     ["verify", trace, "--certificate", name], ["replay", trace, "--device", "sim", "--certificate", name],
                     ["batch", "merge", trace, "-o", name], ["batch", "merge", name, "-o", "merged"],
                     ["batch", HERE / "in", "-o", "out", "--errors", name], ["batch", "check", name, name]):
            assert one_object(kvw(*args, "--json", stdin=b""), 2, "usage").get("verdict") is None, args
    for args in (["run", "-f", ""], ["run", "-m", "", "-p", "a"], ["run", *SIM, "--trace-dir", ""], ["run", *SIM, "--config", ""],
                 ["trace", "ls", "--trace-dir", ""], ["model", "info", ""], ["model", "tokenize", "", "a"], ["batch", "", "-o", "out"],
                 ["batch", HERE / "in", "-o", ""], ["config", "check", ""]):
        one_object(kvw(*args, "--json"), 2, "usage")
    os.mkfifo(HERE / "pipe")
    assert "must be a file" in one_object(kvw("verify", HERE / "pipe", "--json"), 2, "usage")["error"]["message"]
    (HERE / "cwd/.partial").unlink()
    assert not list((HERE / "cwd").iterdir())


@test()
def force_replaces_regular_files_only():
    trace = recorded("forced.kvw.zst")
    kept = trace.read_bytes()
    places = HERE / "places"
    places.mkdir()
    (places / "folder").mkdir()
    os.mkfifo(places / "fifo")
    (places / "link").symlink_to(trace)
    try:
        os.mknod(places / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        (places / "device_link").symlink_to(places / "device")
    except PermissionError:
        pass  # only root makes devices
    kinds = {p: os.lstat(p) for p in places.iterdir()}
    (HERE / "lines").write_text('{"custom_id":"a"}\n')
    for path in kinds:
        for args in (["run", *SIM, "--trace", path], ["verify", trace, "--certificate", path], ["batch", "merge", trace, "-o", path],
                     ["batch", HERE / "lines", "-o", path, "--device", "sim"],
                     ["batch", HERE / "lines", "-o", HERE / "out", "--errors", path, "--device", "sim"]):
            refused = one_object(kvw(*args, "--force", "--json"), 2, "file_exists")["error"]["message"]
            assert f"{path} is not a regular file" in refused, refused
    assert {p: (s.st_mode, s.st_ino) for p, s in kinds.items()} == {p: (os.lstat(p).st_mode, os.lstat(p).st_ino) for p in places.iterdir()}
    assert trace.read_bytes() == kept and not (HERE / "out").exists()
    one_object(kvw("run", *SIM, "--trace", trace, "--force", "--json"), 0)
    assert trace.read_bytes() != kept and one_object(kvw("verify", trace, "--json"), 0)["verdict"] == "PROVEN"


@test()
def removing_a_trace_removes_what_it_stands_for_and_nothing_else():
    folder = HERE / "remove"
    folder.mkdir()
    whole = recorded("remove/bar.kvw.zst")
    bytes_of = whole.read_bytes()
    for name in ("bar.sig", "bar.tail", "bar.kvw.zst.sig", "bar.kvw.zst.tail"):
        (folder / name).touch()
    assert one_object(kvw("trace", "rm", folder / "bar", whole, "--json"), 0)["removed"] == [str(whole)]
    assert sorted(p.name for p in folder.iterdir()) == ["bar.sig", "bar.tail"]
    # One name, two runs: a whole trace, and what a later recorder left when it was to replace it.
    partial = folder / "bar.kvw.zst.partial"
    for path in (whole, partial):
        path.write_bytes(bytes_of)
    (folder / "bar.kvw.zst.tail").touch()
    assert one_object(kvw("trace", "rm", folder / "bar", "--json"), 0)["removed"] == [str(whole)]
    assert partial.exists() and (folder / "bar.kvw.zst.tail").exists()
    assert one_object(kvw("trace", "rm", folder / "bar", "--json"), 0)["removed"] == [str(partial)]
    assert sorted(p.name for p in folder.iterdir()) == ["bar.sig", "bar.tail"]
    one_object(kvw("trace", "rm", folder / "bar", "--json"), 5, "io")


@test()
def solo_of_a_request_that_is_not_there_is_named():
    trace = recorded("solo.kvw.zst")
    wrong = one_object(kvw("replay", trace, "--device", "sim", "--solo", 99, "--json"), 2, "usage")
    assert "request 99" in wrong["error"]["message"] and "verdict" not in wrong, wrong
    assert one_object(kvw("replay", trace, "--device", "sim", "--solo", 1, "--json"), 0)["level"] == "solo"


@test()
def a_signal_ends_the_wait_for_input():
    fifo = HERE / "input"
    os.mkfifo(fifo)
    for command in (["run", "--device", "sim", "-f"], ["batch", "--device", "sim", "-o", "unwritten"]):
        for name in ("/dev/stdin", "-", str(fifo)):
            for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
                p = subprocess.Popen([str(BINARY), *command, name, "--json"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                     stderr=subprocess.PIPE, env=ENV, cwd=HERE / "cwd")
                wait_until_asleep(p.pid)
                p.send_signal(number)
                try:
                    p.wait(30)
                finally:
                    p.kill()
                out, err = p.communicate()
                one_object(Ran(p.returncode, out, err), code, "cancelled")
    assert not list((HERE / "cwd").iterdir()) and not list((HERE / "tmp").iterdir())


def wait_until_asleep(pid):
    """Until the process has slept for a while, as it does only when it waits for input."""
    asleep, until = 0, time.monotonic() + 60
    while asleep < 10 and time.monotonic() < until:
        time.sleep(0.02)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        asleep = asleep + 1 if state == "S" else 0


@test()
def a_stack_that_is_too_small_is_named_with_both_sizes():
    ran = subprocess.run(["bash", "-c", 'ulimit -s 256; "$@"', "_", str(BINARY), "run", *map(str, SIM), "--no-trace", "--json"],
                         capture_output=True, env=ENV)
    message = one_object(Ran(ran.returncode, ran.stdout, ran.stderr), 5, "out_of_memory")["error"]["message"]
    assert "256 KiB" in message and "512 KiB" in message, message


# ---- with a model

PROMPT = "The house at the end of the street was old, and nobody had"


@test(True)
def an_answer_is_the_same_bytes_whichever_way_the_prompt_comes():
    for flags in (["--temp", 0], ["--temp", "1.1", "-s", 7]):
        j = one_object(run("-p", PROMPT, "-n", 12, *flags, "--json"), 0)
        file = HERE / "prompt"
        file.write_text(PROMPT)
        ways = [run(PROMPT, "-n", 12, *flags), run("-n", 12, *flags, stdin=PROMPT.encode()), run("-f", file, "-n", 12, *flags),
                run("-f", "-", "-n", 12, *flags, stdin=PROMPT.encode())]
        assert all(w.code == 0 and w.out == j["text"].encode() and w.err.strip() for w in ways), ways
        lines = lines_of(run("-p", PROMPT, "-n", 12, *flags, "--jsonl").out)
        assert [l["id"] for l in lines[:-1]] == j["ids"] == lines[-1]["ids"], lines
        assert "".join(l["text"] for l in lines[:-1]) == j["text"] == lines[-1]["text"], lines
        assert [l["index"] for l in lines[:-1]] == list(range(len(j["ids"])))
    joined = one_object(run("b", "-n", 1, "--json", stdin=b"a"), 0)
    assert joined["prompt_ids"] == one_object(run("-p", "a b", "-n", 1, "--json"), 0)["prompt_ids"]
    assert b"\n" not in run(PROMPT, "-q", "-n", 1).err


@test(True)
def the_envelope_has_what_others_rely_on():
    j = one_object(run("-p", PROMPT, "-n", 3, "--temp", 0, "--top-logits", 4, "--json", "--tenant", "acme"), 0)
    for key in ("model tenant request prompt_tokens cached_tokens completion_tokens prompt_ids ids text finish_reason timings device isa "
                "class digest trace moment moments first_logits").split():
        assert key in j, key
    assert j["tenant"] == "acme" and j["request"] == "1" and j["class"] == "P" and j["device"] == "cpu"
    assert j["prompt_tokens"] == len(j["prompt_ids"]) and j["completion_tokens"] == len(j["ids"]) == 3
    assert len(j["first_logits"]) == 4 and j["first_logits"][0]["id"] == j["ids"][0]
    assert re.fullmatch("[0-9a-f]{32}", j["digest"]["logits"]) and re.fullmatch("[0-9a-f]{64}", j["digest"]["ledger"])
    assert re.fullmatch("[0-9a-f]{32}:[0-9]+", j["moment"]) and j["moments"]["last"] == j["moment"]
    without = one_object(run("-p", PROMPT, "-n", 3, "--temp", 0, "--no-trace", "--json", "--tenant", "acme"), 0)
    assert without["trace"] is None and without["moment"] is None and without["digest"] == j["digest"], (without, j)
    assert without["ids"] == j["ids"]
    shutil.rmtree(HERE / "xdg/cache")
    assert one_object(run("-p", "a", "-n", 1, "--json"), 0)["model"] == j["model"]  # hashed again, not remembered


@test(True)
def what_does_not_fit_is_refused_with_both_numbers():
    n = one_object(kvw("model", "tokenize", MODEL, PROMPT, "--json"), 0)
    n = len(n["ids"])
    trace = HERE / "refused.kvw.zst"
    r = run("-p", PROMPT, "-c", n + 3, "-n", 4, "--trace", trace, "--json")
    j = one_object(r, 4, "exceed_context_size")
    assert "text" not in j and (j["error"]["n_prompt"], j["error"]["n_max"], j["error"]["limit"]) == (n, n - 1, n + 3), j
    kinds = {e["type"] for e in lines_of(kvw("trace", "dump", trace, "--jsonl").out)}
    assert {"submit", "reject"} <= kinds and not kinds & {"alloc", "reserve", "scrub", "step", "sample"}, kinds
    assert one_object(kvw("verify", trace, "--json"), 6)["verdict"] == "UNPROVEN"
    one_object(run("-p", PROMPT, "-c", 256, "--pool-rows", n + 3, "-n", 4, "--json"), 4, "out_of_pages")
    assert one_object(run("-p", PROMPT, "-c", n + 4, "-n", 4, "--ignore-eos", "--json"), 0)["completion_tokens"] == 4
    quiet = run("-p", PROMPT, "-c", n + 3, "-n", 4)
    assert quiet.code == 4 and not quiet.out and str(n).encode() in quiet.err and b"street" not in quiet.err, quiet


@test(True)
def bad_prompts_are_refused_with_their_offset():
    bad = HERE / "bad"
    bad.write_bytes(b"ab\xff")
    j = one_object(run("-f", bad, "-n", 2, "--json"), 3, "bad_input")
    assert "byte 2" in j["error"]["message"], j
    one_object(run("-n", 2, "--json", stdin=b""), 3, "bad_input")
    one_object(run("-p", "a", "--sys", "b", "--json"), 2, "usage")
    one_object(run("-p", "a", "b", "--json"), 2, "usage")
    one_object(kvw("run", "-m", MODEL, "-p", "a", "--template", "none", "--json"), 3, "bad_template")
    assert not [p for p in (HERE / "xdg").rglob("*.partial")]


@test(True)
def traces_are_kept_verified_replayed_shown_and_removed():
    trace = HERE / "a.kvw.zst"
    j = one_object(run("-p", PROMPT, "-n", 8, "--temp", 0, "--trace", trace, "--json"), 0)
    assert j["trace"] == str(trace) and stat.S_IMODE(trace.stat().st_mode) == 0o600
    before = trace.read_bytes()
    one_object(run("-p", PROMPT, "-n", 8, "--trace", trace, "--json"), 2, "file_exists")
    assert trace.read_bytes() == before

    c = one_object(kvw("verify", trace, "--json"), 0)
    assert c["verdict"] == "PROVEN" and c["level"] == "record" and c["trace"]["closed"] and c["trace"]["ledger_digest"] == j["digest"]["ledger"]
    assert one_object(kvw("verify", trace, "--require", "solo", "--json"), 6)["verdict"] == "PROVEN"
    assert kvw("verify", trace).out.startswith(b"PROVEN at level record")
    both = one_object(kvw("verify", trace, trace, "--json"), 0)
    assert both["schema"] == "kvwitness/certificates" and both["verdict"] == "PROVEN" and len(both["traces"]) == 2
    certificate = HERE / "certificate.json"
    assert kvw("verify", trace, "--certificate", certificate).code == 0 and json.loads(certificate.read_text())["verdict"] == "PROVEN"
    one_object(kvw("verify", trace, "--certificate", certificate, "--json"), 2, "file_exists")

    r = kvw("replay", trace, "-m", MODEL)
    assert r.code == 0 and r.out.splitlines()[-1].startswith(b"PROVEN at level solo"), r
    assert one_object(kvw("replay", trace, "-m", MODEL, "--no-solo", "--json"), 0)["level"] == "execution"

    cut = HERE / "cut.kvw.zst"
    cut.write_bytes(before[:-40])
    assert one_object(kvw("verify", cut, "--json"), 6)["verdict"] == "UNPROVEN"
    assert one_object(kvw("verify", trace, cut, "--json"), 6)["verdict"] == "UNPROVEN"
    one_object(kvw("trace", "show", cut, "--json"), 6)
    changed = bytearray(before)
    changed[len(before) // 2] ^= 1
    cut.write_bytes(changed)
    one_object(kvw("verify", cut, "--json"), 3, "bad_trace")

    shown = one_object(kvw("trace", "show", trace, "--json"), 0)
    assert shown["state"] == "closed" and shown["requests"][0]["end"] in ("length", "stop") and "texts" not in shown, shown
    assert b"street" not in kvw("trace", "show", trace).out and b"street" in kvw("trace", "show", trace, "--with-content").out
    events = lines_of(kvw("trace", "dump", trace, "--jsonl").out)
    numbered = [e["event"] for e in events if e["event"]]
    assert numbered == list(range(1, len(numbered) + 1)) == list(range(1, c["trace"]["events"] + 1))
    alloc = next(e for e in events if e["type"] == "alloc")
    assert alloc["request"] == "1" and isinstance(alloc["page"], int)
    few = lines_of(kvw("trace", "dump", trace, "3..5", "--jsonl").out)
    assert [e["event"] for e in few] == [3, 4, 5]
    pages = lines_of(kvw("trace", "dump", trace, "--page", alloc["page"], "--jsonl").out)
    assert pages and all(e["page"] == alloc["page"] for e in pages)
    assert len(one_object(kvw("trace", "dump", trace, "--request", 1, "--json"), 0)["events"]) > 10
    assert b"street" not in kvw("trace", "dump", trace).out
    texts = [e for e in lines_of(kvw("trace", "dump", trace, "--with-content", "--jsonl").out) if e["type"] == "text"]
    assert [e["text"] for e in texts if e["kind"] == "prompt"] == [PROMPT]
    assert [i for e in texts if e["kind"] == "ids" for i in e["ids"]] == j["ids"]

    one_object(kvw("trace", "rm", certificate, "--json"), 3)
    assert certificate.exists()
    assert one_object(kvw("trace", "rm", trace, "--json"), 0)["removed"] == [str(trace)] and not trace.exists()


@test(True)
def the_store_is_private_and_latest_is_found():
    j = one_object(run("-p", "a", "-n", 2, "--json"), 0)
    stored = Path(j["trace"])
    assert stored.parent == HERE / "xdg/data/kvwitness/traces" and stat.S_IMODE(stored.stat().st_mode) == 0o600
    for folder in (HERE / "xdg/data").rglob("*"):
        assert not folder.is_dir() or stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    hexes = j["moment"].split(":")[0]
    assert one_object(kvw("verify", "@latest", "--json"), 0)["trace"]["run"] == hexes
    assert one_object(kvw("verify", hexes[:12], "--json"), 0)["trace"]["run"] == hexes
    listed = one_object(kvw("trace", "ls", "--json"), 0)["traces"]
    assert listed[0]["run"] == hexes and listed[0]["state"] == "closed"
    assert one_object(kvw("trace", "prune", "--max-size", "1KiB", "--dry-run", "--json"), 0)["removed"] and stored.exists()
    one_object(kvw("trace", "prune", "--keep", "0s", "--max-size", "0", "--json"), 0)
    assert not stored.exists() and not list((HERE / "cwd").iterdir())
    relative = one_object(run("-p", "a", "-n", 1, "--json", env={"XDG_DATA_HOME": "relative"}), 0)
    assert relative["trace"].startswith(str(HERE / "home/.local/share/kvwitness/traces/")), relative["trace"]


@test(True)
def a_run_that_is_stopped_leaves_a_closed_proven_trace():
    for i, (number, want) in enumerate([(signal.SIGINT, 130), (signal.SIGTERM, 143), (None, 141), (signal.SIGINT, "json")]):
        trace = HERE / f"stopped{i}.kvw.zst"
        as_json = ["--jsonl"] if want == "json" else []
        p = subprocess.Popen([str(BINARY), "run", "-m", str(MODEL), "--raw", "-p", PROMPT, "-n", "2000", "--ignore-eos", "--trace", str(trace), *as_json],
                             stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV)
        assert os.read(p.stdout.fileno(), 1)
        if number is None:
            p.stdout.close()
        else:
            p.send_signal(number)
        rest = p.stdout.read() if number else b""
        assert p.wait(60) == (130 if want == "json" else want), p.stderr.read()
        if want == "json":
            last = json.loads(rest.splitlines()[-1])
            assert last["finish_reason"] == "cancelled" and last["error"]["exit"] == 130 and last["text"], last
        assert one_object(kvw("verify", trace, "--json"), 0)["trace"]["closed"] is True
    with open("/dev/full", "wb") as full:
        trace = HERE / "full.kvw.zst"
        assert run("-p", PROMPT, "-n", 8, "--trace", trace, stdout=full).code == 5
        assert one_object(kvw("verify", trace, "--json"), 0)["verdict"] == "PROVEN"
        assert run("-p", PROMPT, "-n", 8, "--json", stdout=full).code == 5
        assert kvw("verify", trace, stdout=full).code == 5
    closed = subprocess.run(["bash", "-c", '"$@" >&-', "_", str(BINARY), "run", "-m", str(MODEL), "--raw", "-p", PROMPT, "-n", "8",
                             "--trace", str(HERE / "closed.kvw.zst")], env=ENV, capture_output=True)
    assert closed.returncode == 5, closed
    assert one_object(kvw("verify", HERE / "closed.kvw.zst", "--json"), 0)["verdict"] == "PROVEN"


@test(True)
def a_killed_run_is_named_with_its_last_event():
    trace = HERE / "killed.kvw.zst"
    p = subprocess.Popen([str(BINARY), "run", "-m", str(MODEL), "--raw", "-p", PROMPT, "-n", "2000", "--ignore-eos", "--trace", str(trace)],
                         stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=ENV)
    os.read(p.stdout.fileno(), 1)
    live = one_object(kvw("trace", "rm", str(trace) + ".partial", "--json"), 2, "usage")
    assert "recorded" in live["error"]["message"]
    p.kill(), p.wait()
    c = one_object(kvw("verify", trace, "--json"), 6)
    assert c["verdict"] == "UNPROVEN" and c["trace"]["events"] > 0 and not c["trace"]["closed"], c


@test(True)
def models_are_described_checked_and_tokenized():
    info = one_object(kvw("model", "info", MODEL, "--json"), 0)
    assert info["supported"] and info["layers"] == 30 and info["kv"]["bytes_per_token"] > 0 and info["types"], info
    assert info["tokenizer"]["pre"] == "smollm" and info["chat_template"]["known"], info
    assert b"supported        yes" in kvw("model", "info", MODEL).out
    assert one_object(kvw("model", "check", MODEL, "--json"), 0)["sha256"] == info["sha256"]
    t = one_object(kvw("model", "tokenize", MODEL, "-", "--json", stdin="Grüße, <|im_end|>".encode()), 0)
    assert t["schema"] == "kvwitness/tokens" and t["text"] == "Grüße, <|im_end|>", t
    plain = one_object(kvw("model", "tokenize", MODEL, "Grüße, <|im_end|>", "--no-special", "--json"), 0)
    assert len(plain["ids"]) > len(t["ids"]) and plain["text"] == t["text"]
    part = HERE / "part.gguf"
    with open(MODEL, "rb") as f:
        part.write_bytes(f.read(1 << 20))
    one_object(kvw("model", "check", part, "--json"), 3, "bad_model")


@test(True)
def bench_measures_both_tests_in_every_format():
    args = ["bench", "-m", MODEL, "-p", 16, "-n", 4, "-d", "0,8", "-r", 1, "-ub", 8]
    b = one_object(kvw(*args, "--format", "json"), 0)
    assert [r["test"] for r in b["results"]] == ["pp16", "tg4", "pp16 @ d8", "tg4 @ d8"], b
    assert all(r["median_ts"] > 0 and r["recording_off_median_ts"] > 0 and r["trace_bytes_per_token"] > 0 for r in b["results"]), b
    assert len(kvw(*args, "--format", "csv").out.splitlines()) == 5
    assert kvw(*args, "--format", "md").out.startswith(b"| test")
    assert not list((HERE / "tmp").iterdir())


def on_a_terminal(args, lines, timeout=120):
    """Runs on a pseudo-terminal; each (wait for, then type) in turn. Everything shown, and the exit status."""
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(HERE / "cwd")
        os.execve(str(BINARY), [str(BINARY), *map(str, args)], {**ENV, "TERM": "xterm"})
    shown, until = b"", time.monotonic() + timeout
    seen = 0
    pending = list(lines)
    while time.monotonic() < until:
        if not select.select([fd], [], [], 0.2)[0]:
            continue
        try:
            data = os.read(fd, 4096)
        except OSError:
            data = b""
        if not data:
            break
        shown += data
        while pending and (at := shown.find(pending[0][0], seen)) >= 0:
            seen = at + len(pending[0][0])
            time.sleep(0.1)  # the prompt is shown just before the terminal is made ready for editing
            os.write(fd, pending.pop(0)[1])
    else:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(fd)
    return shown, code


@test(True)
def a_terminal_without_a_prompt_is_a_conversation():
    shown, code = on_a_terminal(["run", "-m", MODEL, "-n", "8", "--temp", "0"],
                                [(b">>> ", b"/help\r"), (b">>> ", b"Hello\r"), (b">>> ", b"And?\r"), (b">>> ", b"/nothing\r"),
                                 (b">>> ", b"/trace\r"), (b">>> ", b"/clear\r"), (b">>> ", b"/bye\r")])
    assert code == 0 and b"/clear" in shown and b"no command /nothing" in shown, (code, shown)
    trace = re.findall(rb"trace (/[^ ,\]\r\n]+)", shown)[-1].decode()
    assert one_object(kvw("verify", trace, "--json"), 0)["counts"]["requests"] == 2
    texts = [e for e in lines_of(kvw("trace", "dump", trace, "--with-content", "--jsonl").out) if e.get("kind") == "prompt"]
    assert "Hello" in texts[1]["text"] and "And?" in texts[1]["text"], texts
    history = HERE / "xdg/state/kvwitness/history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600 and "And?" in history.read_text()
    history.unlink()
    shown, code = on_a_terminal(["run", "-m", MODEL, "-n", "4", "--no-history"],
                                [(b">>> ", b"\x03"), (b">>> ", b"Hi\r"), (b">>> ", b"\x04")])
    assert code == 0 and not history.exists(), (code, shown)


def main():
    failed = 0
    try:
        for f, needs_model in TESTS:
            if needs_model and MODEL is None:
                print(f"left out, no model: {f.__name__}")
                continue
            try:
                f()
                print(f"ok {f.__name__}", flush=True)
            except (AssertionError, KeyError, IndexError, TypeError, StopIteration, subprocess.TimeoutExpired) as problem:
                failed += 1
                line = problem.__traceback__.tb_next.tb_lineno if problem.__traceback__.tb_next else 0
                print(f"NOT OK {f.__name__}, line {line}: {type(problem).__name__}: {str(problem)[:600]}", flush=True)
    finally:
        shutil.rmtree(HERE, ignore_errors=True)
    print(f"{len(TESTS)} tests, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
