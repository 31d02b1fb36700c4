#!/usr/bin/env python3
"""Reads a trace by traces/FORMAT.md alone, sharing nothing with the C++ reader but that page.

    read_trace.py FILE [--texts]

FILE is a closed trace, or a name of which only .partial and .tail exist. Prints one JSON object per event, then one with
what the whole says. Everything that the file claims (hashes, root, digest.ledger, counts, seek table) is computed anew;
the first difference ends the program with exit status 3. Needs the zstd command.
"""
import hashlib
import json
import os
import struct
import subprocess
import sys
import zlib


# Kinds and fields of version 1.1, and what of them was not there before, which older files say 0 of.
KNOWN = {
    "run": "numerics page_tokens check_headers",
    "model": "sha0 sha1 sha2 sha3 layers heads head_dim vocab context class",
    "pool": "pool group first_page pages rows_max",
    "config": "version",
    "tenant": "tenant",
    "submit": "request tenant prompt_tokens tokens_max input0 input1 session scope",
    "sampling": "request seed temperature top_k top_p min_p repeat presence frequency penalty_last flags stops",
    "reject": "request reason n_prompt n_max limit",
    "queue": "request",
    "admit": "request rows admitted0 admitted1",
    "cancel": "request reason",
    "finish": "request reason prompt_tokens completion_tokens bytes_out logits0 logits1 witness cached_tokens",
    "preempt": "request positions digest0 digest1",
    "resume": "request",
    "reserve": "request pool pages",
    "alloc": "request group index page generation",
    "poison_check": "page words wrong",
    "free": "request page reason",
    "drain": "page",
    "scrub": "page witness",
    "quarantine": "page",
    "share": "request index page generation scope digest0 digest1",
    "adopt": "request index page generation digest0 digest1",
    "evict": "page generation",
    "step": "step sequences",
    "rows": "request count end group version",
    "sourced": "request positions sourced0 sourced1",
    "witness": "request sum",
    "witness_sum": "request positions sum",
    "loaded": "request page layer head access rows tenant_loaded request_loaded generation_loaded page_loaded rows_loaded state_loaded",
    "layer": "request checkpoint layer digest",
    "sample": "request position logits",
    "rendered": "request bytes_out digest0 digest1",
    "emitted": "request bytes_out digest0 digest1",
    "transfer": "request count end version",
    "slot": "request slot stamped_request stamped_step",
    "fault": "number",
    "violation": "request page generation row_begin row_end writer_tenant writer_request",
    "gap": "reason events",
    "run_end": "requests steps rows_read rows_written scrubs scrub_witness",
    "clock": "wall_ns monotonic_ns",
    "host": "version",
}
SINCE = {("submit", "session"): 1, ("submit", "scope"): 1, ("finish", "cached_tokens"): 1}


class BadTrace(Exception):
    pass


def need(holds, what):
    if not holds:
        raise BadTrace(what)


def sha(data):
    return hashlib.sha256(data).digest()


def unzstd(frame, size):
    done = subprocess.run(["zstd", "-q", "-dc"], input=frame, capture_output=True)
    need(done.returncode == 0 and len(done.stdout) == size, "a section does not decompress to its size")
    return done.stdout


class Bytes:
    """A place in some bytes."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, count):
        need(self.at + count <= len(self.data), "something reaches over its end")
        self.at += count
        return self.data[self.at - count : self.at]

    def u8(self):
        return self.take(1)[0]

    def u32(self):
        return struct.unpack("<I", self.take(4))[0]

    def u64(self):
        return struct.unpack("<Q", self.take(8))[0]

    def leb(self):
        value = shift = 0
        while True:
            byte = self.u8()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                need((byte or shift == 7) and value < 1 << 64, "a number is not canonical")
                return value
            need(shift < 70, "a number is too long")

    def more(self):
        return self.at < len(self.data)


def leb(value):
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out + bytes([value]))


class Kind:
    def __init__(self, line):
        code, name, *fields = line.split(" ")
        self.code, self.name = int(code), name.rstrip("?").rstrip("$")
        self.has_bytes = "$" in name
        known = KNOWN.get(self.name)
        self.unknown_critical = known is None and not name.endswith("?")
        self.fields = []  # (name, code, is content)
        for field in fields:
            ignorable, field = field.endswith("?"), field.rstrip("?")
            self.fields.append((field.rstrip("*").split(":")[0], field.rstrip("*")[-1], field.endswith("*")))
            self.unknown_critical |= known is not None and not ignorable and self.fields[-1][0] not in known.split()
        there = [name for name, _, _ in self.fields]
        self.missing = [] if known is None else [name for name in known.split() if name not in there]

    def row_form(self, values, data):
        out = bytes([self.code])
        out += b"".join(leb(v) for v, (_, _, content) in zip(values, self.fields) if not content)
        return out + (leb(len(data)) + data if self.has_bytes else b"")


def columns(raw, kinds, count):
    """The events of a ledger section: [(kind, values, bytes)]."""
    at = Bytes(raw)

    def column():
        return Bytes(at.take(at.leb()))

    order = column().data
    need(len(order) == count, "the kind column has another length")
    streams = {}
    for code in sorted(set(order)):
        kind, n, values = kinds[code], order.count(code), []
        for _, how, _ in kind.fields:
            source, before = column(), 0
            one = []
            for _ in range(n):
                if how == "v":
                    one.append(source.leb())
                elif how == "d":
                    z = source.leb()
                    before = (before + (z >> 1 ^ -(z & 1))) % (1 << 64)
                    one.append(before)
                else:
                    one.append(source.u32() if how == "4" else source.u64())
            need(not source.more(), "a column goes on")
            values.append(one)
        data = [b""] * n
        if kind.has_bytes:
            lengths, joined = column(), column()
            data = [joined.take(lengths.leb()) for _ in range(n)]
            need(not lengths.more() and not joined.more(), "a column goes on")
        streams[code] = iter(zip(zip(*values) if values else [()] * n, data))
    need(not at.more(), "a section goes on")
    return [(kinds[code], *next(streams[code])) for code in order]


def merkle(leaves):
    if len(leaves) == 0:
        return sha(b"")
    if len(leaves) == 1:
        return sha(b"\0" + leaves[0])
    k = 1 << (len(leaves) - 1).bit_length() - 1
    return sha(b"\1" + merkle(leaves[:k]) + merkle(leaves[k:]))


class Trace:
    def __init__(self, path):
        self.open = not os.path.exists(path)
        self.path = path
        with open(path + ".partial" if self.open else path, "rb") as file:
            self.file = Bytes(file.read())
        self.events, self.texts, self.tail_rows = [], [], 0
        self.numbered = self.notes = self.chunks = 0
        self.ledger = hashlib.sha256()
        self.counts, self.leaves, self.frames = {}, [], []
        self.waiting = {}  # tenant -> [request, kind, bytes] of a text that goes on

    def own_frame(self, magic):
        begin = self.file.at
        need(self.file.u32() == 0x184D2A57, f"no frame of ours at byte {begin}")
        body = Bytes(self.file.take(self.file.u32()))
        frame = self.file.data[begin : self.file.at]
        need(sha(frame[:-32]) == frame[-32:], f"the frame at byte {begin} does not match its hash")
        got = body.take(8)
        need(magic is None or got == magic, f"{magic} is not at byte {begin}")
        body.data = body.data[:-32]
        return got, body, frame

    def count_frame(self, frame, raw):
        self.leaves.append(sha(frame))
        self.frames.append((len(frame), raw))

    def event(self, kind, values, data):
        number = None
        self.counts[kind.code] = self.counts.get(kind.code, 0) + 1
        if kind.code < 64:
            self.numbered += 1
            number = self.numbered
            self.ledger.update(kind.row_form(values, data))
        else:
            self.notes += 1
        self.events.append((number, kind, values, data))

    def text(self, tenant, request, kind, data):
        goes_on, kind = kind >> 7, kind & 0x7F
        if kind == 5:
            need(not goes_on, "ids go on")
        elif tenant in self.waiting or goes_on:
            before = self.waiting.pop(tenant, [request, kind, b""])
            need(before[:2] == [request, kind], "a text goes on as another")
            data = before[2] + data
            if goes_on:
                self.waiting[tenant] = [request, kind, data]
                return
        self.texts.append((tenant, request, kind, data))

    def header(self):
        _, body, frame = self.own_frame(b"kvw:head")
        major, minor, mode, flags, zero = struct.unpack("<HHBBH", body.take(8))
        need((major, zero) == (1, 0) and mode < 2 and flags < 2, "an unknown header")
        self.run, created, packed, size = body.take(16), body.u64(), body.u32(), body.u32()
        text = unzstd(body.take(packed), size).decode()
        need(not body.more() and text.endswith("\n"), "the schema ends elsewhere")
        self.kinds = {kind.code: kind for kind in map(Kind, text[:-1].split("\n"))}
        for kind in self.kinds.values():
            for name in kind.missing:
                need(SINCE.get((kind.name, name), 0) > minor, f"{kind.name} without {name}")
        self.count_frame(frame, 0)

    def chunk(self, head, frame):
        run, number, first = head.take(16), head.u64(), head.u64()
        events, notes = head.u32(), head.u32()
        need((run, number, first) == (self.run, self.chunks, self.numbered + 1), "a chunk out of order")
        ledger = head.u32(), head.u32(), head.take(32)
        texts = [(head.u32(), head.u32(), head.u32(), head.take(32)) for _ in range(head.u32())]
        need(not head.more() and [t[0] for t in texts] == sorted({t[0] for t in texts}), "an odd chunk header")
        self.count_frame(frame, 0)

        def section(packed, raw, digest):
            stored = self.file.take(packed)
            need(sha(stored) == digest, f"a section of chunk {number} does not match its hash")
            self.count_frame(stored, raw)
            return unzstd(stored, raw)

        before = self.numbered, self.notes
        for kind, values, data in columns(section(*ledger), self.kinds, events + notes):
            self.event(kind, values, data)
        need((self.numbered, self.notes) == (before[0] + events, before[1] + notes), "a chunk counts otherwise")
        for tenant, packed, raw, digest in texts:
            at = Bytes(section(packed, raw, digest))
            while at.more():
                self.text(tenant, at.leb(), at.u8(), at.take(at.leb()))
        self.chunks += 1

    def footer(self, body, frame):
        need(body.take(16) == self.run, "a footer of another run")
        counts = body.u64(), body.u64(), body.u64(), body.u64()
        need(counts == (self.chunks, self.numbered, self.notes, len(self.leaves)), "the footer counts otherwise")
        need(body.take(32) == self.ledger.digest(), "digest.ledger differs")
        need(body.take(32) == merkle(self.leaves), "the root differs")
        flags = body.u32()
        kinds = [(body.u8(), body.leb()) for _ in range(body.u32())]
        need(flags == 1 and not body.more() and kinds == sorted(self.counts.items()), "the footer's kinds differ")
        need(not self.waiting, "a text has no end")
        self.frames.append((len(frame), 0))
        table = b"".join(struct.pack("<II", *f) for f in self.frames)
        seek = struct.pack("<II", 0x184D2A5E, len(table) + 9) + table
        seek += struct.pack("<IBI", len(self.frames), 0, 0x8F92EAB1)
        need(self.file.take(len(self.file.data) - self.file.at) == seek, "the seek table differs")

    def tail(self):
        with open(self.path + ".tail", "rb") as file:
            at = Bytes(file.read())
        if not at.more():
            return
        head = Bytes(at.take(44))
        need(head.take(8) == b"kvw:tail" and zlib.crc32(head.data[:40]) == struct.unpack("<I", head.data[40:])[0], "no tail")
        if head.take(16) != self.run or head.u64() < self.chunks:
            return
        need(head.u64() == self.numbered + 1, "the tail goes on elsewhere")
        while at.more():
            start = at.take(12)
            size, number = struct.unpack("<IQ", start)
            crc = at.u32()
            row = Bytes(at.take(size))
            need(crc == zlib.crc32(start + row.data) and number == self.numbered + 1, "a row is not the next one")
            self.tail_rows += 1
            while row.more():
                code = row.u8()
                if code == 0:
                    self.text(row.leb(), row.leb(), row.u8(), row.take(row.leb()))
                    continue
                kind = self.kinds[code]
                values = [None if content else row.leb() for _, _, content in kind.fields]
                data = row.take(row.leb()) if kind.has_bytes else b""
                values = [row.leb() if v is None else v for v in values]
                self.event(kind, values, data)

    def read(self):
        self.header()
        while self.file.more():
            magic, body, frame = self.own_frame(None)
            if magic == b"kvw:foot":
                self.footer(body, frame)
                return "closed"
            need(magic == b"kvw:chnk", "an unknown frame")
            self.chunk(body, frame)
        if self.open:
            self.tail()
        return "not_closed"


def main(path, texts):
    trace = Trace(path)
    try:
        end = trace.read()
    except BadTrace as bad:
        print(f"{path}: {bad}", file=sys.stderr)
        return 3
    for number, kind, values, data in trace.events:
        line = {"event": number, "kind": kind.name}
        line.update({name: value for (name, _, _), value in zip(kind.fields, values)})
        line.update({name: 0 for name in kind.missing})
        if kind.has_bytes:
            line["bytes"] = data.hex()
        print(json.dumps(line))
    if texts:
        for tenant, request, kind, data in trace.texts:
            print(json.dumps({"tenant": tenant, "request": request, "text": kind, "bytes": data.hex()}))
    print(json.dumps({"end": end, "run": trace.run.hex(), "events": trace.numbered, "chunks": trace.chunks, "tail_rows": trace.tail_rows,
                      "unknown_critical": sum(kind.unknown_critical for _, kind, _, _ in trace.events),
                      "ledger_digest": trace.ledger.hexdigest(), "root": merkle(trace.leaves).hex()}))
    return 0


if __name__ == "__main__":
    arguments = [a for a in sys.argv[1:] if a != "--texts"]
    if len(arguments) != 1:
        sys.exit(__doc__)
    sys.exit(main(arguments[0], "--texts" in sys.argv))
