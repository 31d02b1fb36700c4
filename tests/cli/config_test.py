#!/usr/bin/env python3
"""The configuration file from outside: which value counts, and what is wrong with a file, with line and column.

Usage: config_test.py BINARY [MODEL], as cli_test.py, whose way of running the program it shares.
"""
import itertools
import json
import re
import subprocess
import sys
import tomllib

sys.dont_write_bytecode = True
import cli_test
from cli_test import BINARY, ENV, HERE, MODEL, kvw, main, one_object, run, test

cli_test.TESTS.clear()
ENV["XDG_CONFIG_HOME"] = str(HERE / "xdg/config")


COUNT = itertools.count(1)


def config(text, name=None):
    path = HERE / (name or f"config{next(COUNT)}.toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def shown(*args, **kw):
    """{"kv.pool-rows": (value, origin, where)} as config show tells it; a tenant's as "tenants.NAME.key"."""
    settings = one_object(kvw("config", "show", *args, "--json", **kw), 0)["settings"]
    return {".".join([s["section"]] + ([s["tenant"]] if "tenant" in s else []) + [s["key"]]): (s["value"], s["origin"], s["where"])
            for s in settings}


def problems(text, lines=False):
    """What config check says about a file, as (line, column, message); with `lines`, without --json it must say the same."""
    path = config(text)
    ran = kvw("config", "check", path, "--json")
    found = one_object(ran, 0 if ran.code == 0 else 2)
    assert found["ok"] == (found["problems"] == []) == (ran.code == 0), found
    told = [f"{path}:{p['line']}:{p['column']}: {p['message']}" for p in found["problems"]]
    if told:
        assert found["error"]["message"] == told[0] and found["error"]["exit"] == 2, found
    if lines:
        plain = kvw("config", "check", path)
        assert plain.code == ran.code == 2 and plain.out.decode().splitlines() == told, (plain, found)
    return [(p["line"], p["column"], p["message"]) for p in found["problems"]]


# One value of each kind that differs from the built-in one: as a flag, and as TOML.
OTHER = {"isa": "ref", "device": "cpu", "roles": "split", "cotenancy": "none", "scope": "session", "on-violation": "continue",
         "text": "plain", "on-trace-error": "warn", "spot-check": "1%", "deadline": "30s", "keep": "14d", "max-size": "4GiB",
         "seed": "7", "stop": "END", "tenant": "acme", "trace-dir": "/a/b", "key-dir": "/c", "template": "chatml", "model": "m.gguf"}
OF_PRUNE = {"keep", "max-size"}  # these have no variable, and config show does not take them


def other_value(key, value):
    if key in OTHER:
        return OTHER[key]
    return "true" if isinstance(value, bool) else "0.5" if key in ("top-p", "min-p") else "3"


def toml(key, flag):
    is_text = key in OTHER and key != "seed"
    return f'"{flag}"' if is_text else flag


@test()
def every_setting_can_be_set_by_file_variable_and_flag_in_this_order():
    built_in = shown()
    assert {k.split(".")[0] for k in built_in} == {"engine", "kv", "limits", "trace", "generation"}
    assert len(built_in) >= 35 and all(o == "built-in" and w is None for _, o, w in built_in.values()), built_in
    assert shown("--config", "/dev/null") == built_in
    for left_out in ({"raw"}, {"chat", "template"}):  # they exclude each other
        file, environment, flags, wanted, line = "", {}, [], {}, 0
        for name, (default, _, _) in built_in.items():
            section, key = name.split(".")
            if key in left_out:
                continue
            value = other_value(key, default)
            variable = "KVW_" + key.upper().replace("-", "_")
            wanted[name] = (value if key in OTHER and key not in ("seed", "stop") else [value] if key == "stop" else json.loads(value), variable)
            file += f"[{section}]\n" if f"[{section}]" not in file else ""
            file += f"{key} = {toml(key, value)}\n"
            if key not in OF_PRUNE:
                environment[variable] = value
                flags += [f"--{key}"] if value == "true" else [f"--{key}", value]
        path = config(file)
        assert problems(file) == []
        places = {l.split(" = ")[0]: f"{path}:{n}" for n, l in enumerate(file.splitlines(), 1)}
        by_file, by_variable = shown("--config", path), shown("--config", path, env=environment)
        by_flag, alone = shown("--config", path, *flags, env=environment), shown(env=environment)
        for name, (value, variable) in wanted.items():
            key = name.split(".")[1]
            assert by_file[name] == (value, "config", places[key]), (name, by_file[name])
            if key not in OF_PRUNE:
                assert by_variable[name] == alone[name] == (value, "variable", variable), (name, by_variable[name])
                assert by_flag[name] == (value, "flag", f"--{key}"), (name, by_flag[name])
        assert {n for n, v in by_file.items() if v[1] == "built-in"} == built_in.keys() - wanted.keys()


@test()
def the_weaker_source_is_not_asked_and_the_file_always_right_or_wrong():
    file = config("[generation]\ntemp = 0.5\n[limits]\nqueue = 5\n[tenants.acme]\nquota = 64\n[tenants.\"eu.acme\"]\ndeadline = \"2m\"\n")
    got = shown("--config", file, "--temp", "0.25", env={"KVW_TEMP": "hot", "KVW_QUEUE": "6"})
    assert got["generation.temp"] == (0.25, "flag", "--temp") and got["limits.queue"] == (6, "variable", "KVW_QUEUE"), got
    assert got["tenants.acme.quota"] == (64, "config", f"{file}:6") and got["tenants.eu.acme.deadline"][0] == "2m", got
    assert shown("--config", file, env={"KVW_QUEUE": ""})["limits.queue"][0] == 5  # an empty variable is none
    one_object(kvw("config", "show", "--config", file, "--json", env={"KVW_TEMP": "hot"}), 2, "usage")
    bad = config("[generation]\ntemp = -1\n")
    for args in (["config", "show", "--temp", "1"], ["verify", "x"], ["trace", "ls"], ["bench", "limits"], ["run", "--temp", "1", "-p", "a"]):
        message = one_object(kvw(*args, "--config", bad, "--json"), 2, "usage")["error"]["message"]
        assert message == f"{bad}:2:8: temp: '-1' is not a number from 0 to 1000", message
        ran = kvw(*args, "--config", bad)
        assert ran.code == 2 and not ran.out and f"{bad}:2:8: ".encode() in ran.err, ran


@test()
def what_only_run_takes_is_no_error_for_others():
    file = config('[engine]\ntenant = "acme"\n[kv]\npool-rows = 4096\n[generation]\ntemp = 0.5\nstop = ["a", "b"]\n[limits]\ndeadline = "30s"\n')
    assert one_object(kvw("trace", "ls", "--config", file, "--json"), 0)["traces"] == []
    assert one_object(kvw("verify", HERE / "none", "--config", file, "--json"), 5, "io")
    for command in (["help", "run"], ["completion", "bash"], ["--version"], ["run", "--help"]):
        assert kvw(*command, env={"KVW_CONFIG": str(config("[", "bad.toml"))}).code == 0, command


@test()
def the_file_is_the_named_one_or_the_one_in_the_xdg_folder():
    ours = "[kv]\npool-rows = {}\n"
    named, variable = config(ours.format(1)), config(ours.format(2), "variable.toml")
    (HERE / "cwd/kvwitness.toml").write_text(ours.format(9))
    (HERE / "cwd/config.toml").write_text(ours.format(9))
    rows = lambda *args, **kw: shown(*args, **kw)["kv.pool-rows"][0]
    try:
        assert rows() == 0
        place = config(ours.format(3), "xdg/config/kvwitness/config.toml")
        assert rows() == 3 and shown()["kv.pool-rows"][2] == f"{place}:2"
        assert rows(env={"KVW_CONFIG": str(variable)}) == 2
        assert rows("--config", named, env={"KVW_CONFIG": str(variable)}) == 1
        assert rows("--config", "kvwitness.toml") == 9 and rows(env={"KVW_CONFIG": "kvwitness.toml"}) == 9
        config(ours.format(4), "home/.config/kvwitness/config.toml")
        for xdg in ("relative", "./xdg", ""):
            assert rows(env={"XDG_CONFIG_HOME": xdg}) == 4, xdg
        (HERE / "cwd/relative/kvwitness").mkdir(parents=True)
        (HERE / "cwd/relative/kvwitness/config.toml").write_text(ours.format(9))
        assert rows(env={"XDG_CONFIG_HOME": "relative"}) == 4
        assert rows(env={"XDG_CONFIG_HOME": "relative", "HOME": "nowhere"}) == 0  # no place at all: no file
        assert rows("--config", "-", stdin=ours.format(5).encode()) == 5
        assert one_object(kvw("config", "check", "--json"), 0)["file"] == str(place)
        for bad in (HERE / "absent.toml", HERE):
            for args in (["config", "show", "--config", bad], ["config", "check", bad], ["trace", "ls", "--config", bad]):
                assert str(bad) in one_object(kvw(*args, "--json"), 2, "usage")["error"]["message"]
        assert "KVW_CONFIG" in one_object(kvw("trace", "ls", "--json", env={"KVW_CONFIG": "absent"}), 2, "usage")["error"]["message"]
    finally:
        for made in (HERE / "xdg/config/kvwitness/config.toml", HERE / "home/.config/kvwitness/config.toml"):
            made.unlink(missing_ok=True)
    nothing = one_object(kvw("config", "check", "--json"), 0)
    assert nothing["file"] is None and nothing["ok"], nothing


@test()
def every_problem_of_a_file_is_named_with_its_place():
    found = problems("[kvv]\npool-rows = 4096\n[engine]\ndevice = cpu_\n")  # what is not TOML comes first and alone
    assert len(found) == 1 and found[0][0] == 4 and found[0][1] >= 10, found
    assert problems("""pool-rows = 3
kv-pool = 3
[kv]
pool-rows = 4096
poolrows = 1
pool-rowz-and-more = 1
scope = "all"
[rum]
x = 1
[enginee]
[limits]
deadline = "30 s"
queue = "5"
quota = -4
pool-rows = 5
context = 4294967296
[engine]
device = 5
threads = 1.5
rehash = "yes"
roles = ["split"]
spot-check = "200%"
tenant = "ACME"
[trace]
no-trace = 1
max-size = "99999999999999999999GiB"
keep = "forever"
[generation]
temp = "hot"
top-p = nan
min-p = inf
tokens = 0
stop = ["a", 1]
ignore-eos = 2026-01-01
seed = "x"
raw = true
chat = true
sys = "x"
[generation.deep]
a = 1
[tenants.acme]
quota = 64
quoat = 1
deadline = 30
queue = 1
[tenants.acme.eu]
quota = 1
[tenants."BAD NAME"]
quota = -1
""", lines=True) == [
        (1, 1, "'pool-rows' belongs in [kv]"),
        (2, 1, "unknown key 'kv-pool' before the first section."),
        (5, 1, "unknown key 'poolrows' in [kv]. Did you mean 'pool-rows'?"),
        (6, 1, "unknown key 'pool-rowz-and-more' in [kv]."),
        (7, 9, "scope: 'all' is not one of request|session|tenant"),
        (8, 2, "unknown section [rum]. There are engine, kv, limits, trace, generation, tenants"),
        (10, 2, "unknown section [enginee]. Did you mean 'engine'?"),
        (12, 12, "deadline: '30 s' is not a duration such as 500ms, 30s or 5m"),
        (13, 9, "'queue' wants a whole number, not text"),
        (14, 9, "quota: '-4' is not a whole number from 0 to 68719476736"),
        (15, 1, "'pool-rows' belongs in [kv]"),
        (16, 11, "context: '4294967296' is not a whole number from 0 to 4294967295"),
        (18, 10, "'device' wants text in quotes, not a whole number"),
        (19, 11, "'threads' wants a whole number, not a decimal number"),
        (20, 10, "'rehash' wants true or false, not text"),
        (21, 9, "'roles' wants text in quotes, not a list"),
        (22, 14, "spot-check: '200%' is not a share from 0% to 100%"),
        (23, 10, "tenant: 'ACME' is not a tenant: 1 to 64 of a-z 0-9 . _ -"),
        (25, 12, "'no-trace' wants true or false, not a whole number"),
        (26, 12, "max-size: '99999999999999999999GiB' is not a size such as 5GiB or 300MB"),
        (27, 8, "keep: 'forever' is not a duration such as 14d, 36h or 30m"),
        (29, 8, "'temp' wants a number, not text"),
        (30, 9, "top-p: 'nan' is not a number from 0 to 1"),
        (31, 9, "min-p: 'inf' is not a number from 0 to 1"),
        (32, 10, "tokens: '0' is not a whole number from 1 to 4294967295"),
        (33, 8, "'stop' wants text in quotes or a list of it, not a list with a whole number in it"),
        (34, 14, "'ignore-eos' wants true or false, not a date or time"),
        (35, 8, "seed: 'x' is not a whole number of at least 0"),
        (37, 1, "'raw' and 'chat' exclude each other"),
        (38, 1, "unknown key 'sys' in [generation]."),
        (39, 13, "unknown key 'deep' in [generation]."),
        (43, 1, "unknown key 'quoat' in [tenants.acme]. Did you mean 'quota'?"),
        (44, 12, "'deadline' wants text in quotes, not a whole number"),
        (45, 1, "'queue' belongs in [limits]"),
        (46, 15, "a tenant's name with a dot in it needs quotes: [tenants.\"acme.eu\"]"),
        (48, 10, "'BAD NAME' is not a tenant: 1 to 64 of a-z 0-9 . _ -")]
    assert problems("engine = 5\ntenants = 1\n") == [(1, 1, "[engine] is a section, not a whole number"),
                                                     (2, 1, "[tenants] is a section, not a whole number")]
    assert problems("[tenants]\nacme = 5\n") == [(2, 1, "what holds for tenant 'acme' stands in [tenants.acme], not in one value")]
    several = config("[kv]\na = 1\nb = 2\n")
    message = one_object(kvw("trace", "ls", "--config", several, "--json"), 2, "usage")["error"]["message"]
    assert message == f"{several}:2:1: unknown key 'a' in [kv]. (1 more; kvwitness config check {several} lists them)", message


@test()
def hostile_files_are_refused_before_the_toml_reader_sees_them():
    assert problems("a." * 1_000_000 + "a = 1\n") == [(1, 1, "more than 65536 bytes in a configuration file")]
    assert problems("a." * 30_000 + "a = 1\n") == [(1, 34, "more than 16 dots in one key")]
    assert problems("[kv]\npool-rows = " + "[" * 60_000) == [(2, 29, "more than 16 brackets open at once")]
    assert problems("a = " + "{a=" * 20_000)[0][:2] == (1, 53)
    assert problems(b"# \xff\n") == [(1, 3, "not UTF-8: no character begins with this byte")]
    assert problems(b"[kv]\n\0\n") == [(2, 1, "a control character (0x00)")]
    assert problems('a = """\nb"""\n')[0][2].startswith("a string of several lines")
    beyond = "a character beyond ASCII outside a quoted string and a comment"
    for low, high in ((0xA0, 0x499), (0x2C5E, 0x3057), (0xFB26, 0xFEFF)):  # where toml++ 3.3.0 is undefined
        for point in (low, (low + high) // 2, high):
            assert problems(f"[kv]\npool-rows = {chr(point)}1\n{chr(point)}\nx{chr(point)} = 1\n") == [
                (2, 13, beyond), (3, 1, beyond), (4, 2, beyond)], hex(point)
            assert problems(f'# {chr(point)}\n[generation]\nstop = ["{chr(point)}", \'{chr(point)}\'] # {chr(point)}\n') == [], hex(point)
    assert problems("\ufeff[kv]\r\npool-rows = 5\r\n") == []
    # No end and no regular file: as much as is needed is read.
    ran = subprocess.run([BINARY, "config", "check", "/dev/zero"], capture_output=True, env=ENV, timeout=20)
    assert ran.returncode == 2 and b"/dev/zero:1:1: more than 65536 bytes" in ran.stdout, ran
    evil = kvw("config", "check", config(b'[kv]\n"\\u001b[31m\\u202e" = 1\n'))
    assert evil.code == 2 and b"\x1b" not in evil.out + evil.err and "\u202e".encode() not in evil.out, evil


@test()
def sizes_and_numbers_of_any_length_are_refused_or_kept():
    for key, section, good, bad in (("max-size", "trace", ['"4GiB"', "4096", '"0"', '"18446744073709551615"', '"1TiB"'],
                                     ['"4 GiB"', '"4gib"', '"-1"', '""', '"18446744073709551616"', '"16777217TiB"', "-5", "1.5"]),
                                    ("pool-rows", "kv", ["0", "4_096", "0x1000", "68719476736"],
                                     ["68719476737", "-1", "9223372036854775807", "9223372036854775808", '"4096"', "1e3", "-9223372036854775808"]),
                                    ("deadline", "limits", ['"0s"', '"500ms"', '"1h"', '"9999999999s"'],
                                     ['"5"', '"1d"', '"s"', '"-1s"', '"1.5s"', '"99999999999999999999s"', "30"]),
                                    ("spot-check", "engine", ['"0%"', '"100%"', '"0.5%"'], ['"101%"', '"1"', '"%"', '"-1%"', '"nan%"', "1"]),
                                    ("seed", "generation", ["0", "-1", '"18446744073709551615"'], ['"18446744073709551616"', "-2", "1.5", '""']),
                                    ("temp", "generation", ["0", "0.0", "1000", "1e-3"], ["-0.1", "1e4", "inf", "nan", '"1"', "1e400"]),
                                    ("parallel", "engine", ["1", "65536"], ["0", "65537"])):
        for value in good + bad:
            found = problems(f"[{section}]\n{key} = {value}\n")
            wrong = len(found) == 1 and found[0][0] == 2 and found[0][1] > len(key)
            assert wrong if value in bad else found == [], (key, value, found)
    # The same readers stand behind the flag and the variable.
    for flag, value in (("--deadline", "5"), ("--spot-check", "1"), ("--quota", "-1"), ("--np", "0"), ("--scope", "all"), ("--tenant", "ACME"),
                        ("--session", "x" * 65), ("--cotenancy", "some"), ("--roles", "both"), ("--prefill-rows", "many"), ("--queue", "x")):
        one_object(kvw("run", "-p", "a", flag, value, "--json"), 2, "usage")
    assert shown("-np", "5")["engine.parallel"][0] == 5 and shown("-ub", "5")["engine.ubatch"][0] == 5


@test()
def each_variable_that_help_names_is_read_strictly():
    commands = {"run": ["-p", "a"], "batch": ["x", "-o", "y"], "verify": ["x"], "replay": ["x"], "trace ls": [], "trace show": ["x"], "trace dump": ["x"],
                "trace prune": [], "trace rm": ["x"], "model info": ["x"], "model check": ["x"], "model tokenize": ["x", "y"], "bench": [],
                "bench verify": [], "bench limits": [], "config show": [], "config check": []}
    read = set()
    for command, arguments in commands.items():
        help_text = kvw(*command.split(), "--help").out.decode()
        rows = [row for row in re.sub(r"\n {20,}", "  ", help_text).splitlines() if row.startswith("  -")]
        for left, variable in (found.groups() for row in rows if (found := re.match(r"  (-.*?)  .*\((KVW_\w+)\)$", row))):
            assert variable == "KVW_" + left.split()[0].split("--")[-1].upper().replace("-", "_"), (command, left, variable)
            kind = left.split()[1] if " " in left else "flag"
            if kind in ("TEXT", "FILE", "DIR", "LEVEL") or variable in ("KVW_TEMPLATE", "KVW_SESSION", "KVW_TENANT_FIELD"):
                continue
            message = one_object(kvw(*command.split(), *arguments, "--json", env={variable: "?!"}), 2, "usage")["error"]["message"]
            assert variable in message and "'?!'" in message, (command, variable, message)
            read.add(variable)
    for variable in ("KVW_TOKENS", "KVW_COLOR", "KVW_QUIET", "KVW_IGNORE_EOS", "KVW_UBATCH", "KVW_PARALLEL", "KVW_DEADLINE", "KVW_TENANT"):
        assert variable in read, (variable, read)


@test()
def switches_can_be_taken_back():
    file = config("[generation]\nignore-eos = true\nraw = true\n[trace]\nno-trace = true\n")
    assert shown("--config", file)["generation.ignore-eos"][0] is True
    assert shown("--config", file, env={"KVW_IGNORE_EOS": "0"})["generation.ignore-eos"] == (False, "variable", "KVW_IGNORE_EOS")
    assert shown("--config", file, "--ignore-eos=false", env={"KVW_IGNORE_EOS": "1"})["generation.ignore-eos"] == (False, "flag", "--ignore-eos")
    one_object(kvw("config", "show", "--ignore-eos=maybe", "--json"), 2, "usage")
    one_object(kvw("trace", "ls", "--json=false", "--json"), 2, "usage")
    # What says the opposite with more right wins; from the same source it is refused.
    assert shown("--config", file, "--trace", "x")["trace.no-trace"] == (False, "built-in", None)
    assert shown("--config", file, "--chat")["generation.raw"] == (False, "built-in", None)
    assert shown("--config", file, "--sys", "x")["generation.raw"] == (False, "built-in", None)
    assert shown("--config", file, env={"KVW_TEMPLATE": "chatml"})["generation.raw"] == (False, "built-in", None)
    assert shown("--config", config('[generation]\ntemplate = "chatml"\n'), "--raw")["generation.template"] == (None, "built-in", None)
    assert shown("--raw=false", env={"KVW_CHAT": "1"})["generation.chat"][0] is True
    one_object(kvw("run", "-p", "a", "--trace", "x", "--no-trace", "--json"), 2, "usage")


@test()
def what_config_show_prints_is_a_configuration_file():
    file = config('[generation]\nstop = ["a\\n", "\u4e00\\"\\\\", "\\u0000"]\nmodel = \'C:\\x\'\nseed = "18446744073709551615"\ntemp = 0.1\n'
                  '[tenants.acme]\nquota = 64\n[tenants."a.b"]\ndeadline = "1s"\n')
    for flags in ([], ["--origin"]):
        printed = kvw("config", "show", "--config", file, *flags)
        assert printed.code == 0 and not printed.err, printed
        assert problems(printed.out) == []
        parsed = tomllib.loads(printed.out.decode())
        assert parsed["generation"]["stop"] == ["a\n", "\u4e00\"\\", "\0"] and parsed["generation"]["model"] == "C:\\x"
        assert parsed["generation"]["seed"] == "18446744073709551615" and parsed["generation"]["temp"] == 0.1
        assert parsed["tenants"] == {"acme": {"quota": 64}, "a.b": {"deadline": "1s"}}
    again = shown("--config", config(printed.out, "again.toml"))
    first = shown("--config", file)
    assert {k: v[0] for k, v in again.items()} == {k: v[0] for k, v in first.items()}
    lines = kvw("config", "show", "--config", file, "--origin", "--top-k", "1", env={"KVW_QUOTA": "5"}).out.decode().splitlines()
    for key, origin in (("temp", f"config {file}:5"), ("top-k", "flag --top-k"), ("quota", "variable KVW_QUOTA"), ("sync", "built-in")):
        assert any(re.fullmatch(rf"{key} = .*# {re.escape(origin)}", line) for line in lines), (key, lines)
    hint = kvw("config", "show", env={"KVW_POOL_ROW": "1"})
    assert hint.code == 0 and b"KVW_POOL_ROW is no setting's variable. Did you mean 'KVW_POOL_ROWS'?" in hint.err, hint


@test()
def help_and_completion_know_config():
    for command in ("config show", "config check"):
        ran = kvw(*command.split(), "--help")
        assert ran.code == 0 and ran.out.index(b"Examples:") < ran.out.index(b"Usage:"), ran
        assert ran.out == kvw("help", *command.split()).out
    script = HERE / "completion.bash"
    script.write_bytes(kvw("completion", "bash").out)
    ask = f"source {script}; COMP_WORDS=(kvwitness config ''); COMP_CWORD=2; _kvwitness; echo ${{COMPREPLY[@]}}"
    assert {b"show", b"check"} <= set(subprocess.run(["bash", "-c", ask], capture_output=True).stdout.split())
    assert b"--spot-check" in kvw("completion", "bash").out and b"spot-check" in kvw("completion", "fish").out
    one_object(kvw("config", "--json"), 2, "usage")
    one_object(kvw("config", "shwo", "--json"), 2, "usage")
    assert one_object(kvw("run", "-m", "x", "-p", "a", "--device", "cuda", "--json"), 5, "no_device")
    assert one_object(kvw("run", "-m", "x", "-p", "a", "--json", "--config", config('[engine]\ndevice = "cuda"\n')), 5, "no_device")


# ---- with a model


@test(True)
def a_run_obeys_its_file_its_variables_and_its_flags():
    prompt = "The house at the end of the street was old, and nobody had"
    file = config('[generation]\ntokens = 3\ntemp = 0\nraw = true\n[engine]\ntenant = "acme"\n[trace]\nno-trace = true\n')
    go = lambda *args, **kw: one_object(kvw("run", "-m", MODEL, "-p", prompt, "--json", *args, **kw), 0)
    j = go("--config", file)
    assert (j["completion_tokens"], j["tenant"], j["trace"]) == (3, "acme", None), j
    assert one_object(run("-p", "a", "-n", 1, "--config", config('[engine]\nisa = "ref"\n'), "--json"), 0)["isa"] == "ref"
    assert j["ids"] == one_object(run("-p", prompt, "-n", 3, "--temp", 0, "--json"), 0)["ids"]
    j = go("--config", file, env={"KVW_TOKENS": "4", "KVW_TENANT": "globex", "KVW_NO_TRACE": "0"})
    assert (j["completion_tokens"], j["tenant"]) == (4, "globex") and j["trace"], j
    j = go("--config", file, "-n", 5, "--tenant", "initech", "--trace", HERE / "configured.kvw.zst", env={"KVW_TOKENS": "4"})
    assert (j["completion_tokens"], j["tenant"], j["trace"]) == (5, "initech", str(HERE / "configured.kvw.zst")), j
    assert one_object(kvw("verify", HERE / "configured.kvw.zst", "--config", file, "--json"), 0)["verdict"] == "PROVEN"
    model = config(f"[generation]\nmodel = {json.dumps(str(MODEL))}\nraw = true\ntokens = 1\n")
    assert one_object(kvw("run", "-p", prompt, "--json", env={"KVW_CONFIG": str(model)}), 0)["completion_tokens"] == 1
    one_object(kvw("model", "info", "--config", model, "--json"), 0)
    n = j["prompt_tokens"]
    for limit, code in ((f"[limits]\ncontext = {n + 3}\n", "exceed_context_size"), (f"[limits]\ncontext = 256\n[kv]\npool-rows = {n + 3}\n", "out_of_pages")):
        small = config("[generation]\nraw = true\n" + limit)
        one_object(kvw("run", "-m", MODEL, "-p", prompt, "-n", 4, "--config", small, "--json"), 4, code)
        roomy = ["-c", "256", "--pool-rows", "256"]
        one_object(kvw("run", "-m", MODEL, "-p", prompt, "-n", 4, "--config", small, *roomy, "--json"), 0)
    # A system message asks for the template that the file's raw would switch off.
    assert go("--config", file, "--sys", "Be brief.", "-n", 1)["prompt_tokens"] > n


if __name__ == "__main__":
    sys.exit(main())
