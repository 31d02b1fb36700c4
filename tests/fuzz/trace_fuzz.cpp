// Arbitrary bytes as a trace. Hashes stop plain mutation at the first frame, so the first byte of
// an input says what the rest is, and everything around it is made right:
//     0 the whole file    1 a ledger section    2 a text section    3 the schema, and a ledger
//     section behind NUL 4 the payload of a tail row    5 the whole tail
#include <unistd.h>

#include <cstdint>

#include "tests/traces/support.h"

using namespace kvw;
using namespace kvw::test;

namespace {

const TempFolder& folder() {
    static const TempFolder made;
    return made;
}

void read(const Path& path) {
    auto reader = TraceReader::open(path);
    if (!reader) {
        return;
    }
    TraceChunk chunk;
    std::uint64_t last = 0;
    for (auto more = reader->next(chunk); more; more = reader->next(chunk)) {
        if (!*more) {
            check(reader->ending().last_event >= last, "events are counted forward");
            (void)reader->ledger_digest();
            return;
        }
        check(chunk.first_event == last + 1, "chunks are numbered through");
        for (const Event& event : chunk.events) {
            last += event.numbered();
            (void)to_text(event);
        }
        for (const TextRecord& text : chunk.texts) {
            check(text.bytes.size() <= 2 * traces::kTextMax, "texts are bounded");
        }
    }
}

// The chunk header claims as many events as the kind column has, so that decoding gets past it.
HandMade::Chunk chunk_of(std::string raw) {
    HandMade::Chunk chunk;
    chunk.raw = std::move(raw);
    traces::Cursor cursor(traces::as_bytes(chunk.raw));
    for (const std::uint8_t code : cursor.take(cursor.varint())) {
        (code < 64 ? chunk.events : chunk.notes) += 1;
    }
    return chunk;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size == 0 || size > 200000) {
        return 0;
    }
    const std::string rest(reinterpret_cast<const char*>(data) + 1, size - 1);
    const Path file = folder() / "x.kvw.zst", partial = folder() / "y.kvw.zst.partial",
               tail = folder() / "y.kvw.zst.tail";
    HandMade made;
    switch (data[0] % 6) {
        case 0:
            put_bytes(file, rest);
            read(file);
            break;
        case 1:
            made.chunks = {chunk_of(rest)};
            break;
        case 2:
            made.chunks = {chunk_of(std::string(1, '\0'))};
            made.chunks[0].texts = {{1, rest}};
            break;
        case 3:
            made.schema = rest.substr(0, rest.find('\0'));
            made.chunks = {chunk_of(rest.substr(std::min(rest.size(), made.schema.size() + 1)))};
            break;
        case 4:
        case 5: {
            std::string bytes = rest;
            if (data[0] % 6 == 4) {
                bytes = traces::tail_head({made.header.run_id, 0, 1}) +
                        std::string(traces::kRowHead, '\0') + rest;
                traces::finish_row(
                    reinterpret_cast<std::uint8_t*>(bytes.data()) + traces::kTailHead,
                    static_cast<std::uint32_t>(rest.size()), 1);
            }
            put_bytes(partial, traces::file_header_frame(made.header, made.schema));
            put_bytes(tail, bytes);
            read(folder() / "y.kvw.zst");
            break;
        }
    }
    if (!made.chunks.empty()) {
        put_bytes(file, made.bytes());
        read(file);
    }
    return 0;
}
