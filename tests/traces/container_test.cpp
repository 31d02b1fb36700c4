#include "traces/container.h"

#include <doctest/doctest.h>
#include <zstd.h>

#include "tests/traces/support.h"

using namespace kvw;
using namespace kvw::traces;
using namespace kvw::test;

namespace {

// RFC 6962, 2.1, as it is written there.
Digest256 merkle_by_the_book(std::span<const Digest256> data) {
    if (data.empty()) {
        return sha256(std::string_view{});
    }
    std::string bytes;
    if (data.size() == 1) {
        bytes += '\0';
        bytes += as_text(data[0]);
        return sha256(bytes);
    }
    std::size_t k = 1;
    while (k * 2 < data.size()) {
        k *= 2;
    }
    bytes += '\1';
    const Digest256 left = merkle_by_the_book(data.first(k));
    const Digest256 right = merkle_by_the_book(data.subspan(k));
    bytes += as_text(left);
    bytes += as_text(right);
    return sha256(bytes);
}

bool reads_back(std::uint64_t value) {
    std::string bytes = leb128(value);
    const std::size_t size = bytes.size();
    bytes.append(kVarintMax, '\0');
    const auto* at = reinterpret_cast<const std::uint8_t*>(bytes.data());
    std::uint64_t back = 0;
    return get_varint(at, back) && back == value &&
           at == reinterpret_cast<const std::uint8_t*>(bytes.data()) + size;
}

bool refused(std::vector<std::uint8_t> bytes) {
    bytes.resize(bytes.size() + kVarintMax);
    const std::uint8_t* at = bytes.data();
    std::uint64_t value = 0;
    return !get_varint(at, value) && at <= bytes.data() + kVarintMax;
}

}  // namespace

TEST_CASE("LEB128 numbers read back and have one form each") {
    for (unsigned bit = 0; bit < 64; ++bit) {
        const std::uint64_t power = 1ull << bit;
        CHECK(reads_back(power - 1));
        CHECK(reads_back(power));
        CHECK(unzigzag(zigzag(power)) == power);
        CHECK(unzigzag(zigzag(0 - power)) == 0 - power);
    }
    CHECK(reads_back(~0ull));
    CHECK(zigzag(0) == 0);
    CHECK(zigzag(0 - 1ull) == 1);
    CHECK(zigzag(1) == 2);
    CHECK(refused({0x80, 0x00}));  // 0 in two bytes
    CHECK(refused({0xff, 0x80, 0x00}));
    CHECK(refused({0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02}));  // bit 64
    CHECK(refused({0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01}));
}

TEST_CASE("the row checksum is the common CRC-32") {
    CHECK(crc32(as_bytes("123456789")) == 0xCBF43926);
    const std::string text = "any bytes, cut anywhere";
    for (std::size_t i = 0; i <= text.size(); ++i) {
        const std::string_view whole = text;
        CHECK(crc32(as_bytes(whole.substr(i)), crc32(as_bytes(whole.substr(0, i)))) ==
              crc32(as_bytes(text)));
    }
}

TEST_CASE("the Merkle tree is the one of RFC 6962 at every size") {
    MerkleTree tree;
    std::vector<Digest256> data;
    CHECK(tree.root() == merkle_by_the_book(data));
    for (std::uint32_t i = 0; i < 70; ++i) {
        data.push_back(sha256(std::to_string(i)));
        tree.add(data.back());
        CHECK(tree.root() == merkle_by_the_book(data));
    }
    CHECK(tree.leaves() == data.size());
}

TEST_CASE("frames read back, and one changed bit in them is seen") {
    ChunkHeader chunk{
        .run_id = some_run_id(), .number = 3, .first_event = 99, .events = 7, .notes = 2};
    chunk.ledger = {0, 100, 200, sha256("ledger")};
    chunk.texts = {{1, 50, 60, sha256("a")}, {9, 70, 80, sha256("b")}};
    Footer footer{.run_id = some_run_id(), .chunks = 4, .events = 105, .notes = 2, .leaves = 9};
    footer.kinds = {{1, 5}, {30, 100}};
    const std::string chunk_frame = chunk_header_frame(chunk);
    const std::string foot_frame = footer_frame(footer);
    CHECK(chunk_frame.size() == chunk_header_size(2));

    const auto chunk_back = parse_chunk_header(as_bytes(chunk_frame));
    REQUIRE(chunk_back.has_value());
    CHECK(chunk_header_frame(*chunk_back) == chunk_frame);
    const auto foot_back = parse_footer(as_bytes(foot_frame));
    REQUIRE(foot_back.has_value());
    CHECK(*foot_back == footer);

    for (std::size_t bit = 0; bit < chunk_frame.size() * 8; ++bit) {
        std::string changed = chunk_frame;
        changed[bit / 8] ^= static_cast<char>(1 << bit % 8);
        CHECK_FALSE(parse_chunk_header(as_bytes(changed)).has_value());
    }
    for (std::size_t bit = 0; bit < foot_frame.size() * 8; ++bit) {
        std::string changed = foot_frame;
        changed[bit / 8] ^= static_cast<char>(1 << bit % 8);
        CHECK_FALSE(parse_footer(as_bytes(changed)).has_value());
    }
}

TEST_CASE("a chunk header that asks for too much is refused before anything is allocated") {
    const auto refuses = [](auto change) {
        ChunkHeader chunk{.run_id = some_run_id(), .first_event = 1, .events = 1};
        chunk.ledger = {0, 100, 200, {}};
        change(chunk);
        return !parse_chunk_header(as_bytes(chunk_header_frame(chunk))).has_value();
    };
    CHECK_FALSE(refuses([](ChunkHeader&) {}));
    CHECK(refuses([](ChunkHeader& chunk) { chunk.ledger.raw = kRawMax + 1; }));
    CHECK(refuses([](ChunkHeader& chunk) { chunk.ledger.packed = 0xffffffff; }));
    CHECK(refuses([](ChunkHeader& chunk) { chunk.ledger.raw = 0; }));
    CHECK(refuses([](ChunkHeader& chunk) { chunk.events = 201; }));
    CHECK(refuses([](ChunkHeader& chunk) { chunk.events = 0xffffffff, chunk.notes = 0xffffffff; }));
    CHECK(refuses([](ChunkHeader& chunk) { chunk.texts = {{2, 9, 9, {}}, {2, 9, 9, {}}}; }));
    CHECK(refuses([](ChunkHeader& chunk) { chunk.texts = {{2, 9, 9, {}}, {1, 9, 9, {}}}; }));
    CHECK(refuses([](ChunkHeader& chunk) {
        for (std::uint32_t tenant = 0; tenant < 3; ++tenant) {
            chunk.texts.push_back({tenant, 9, kRawMax, {}});
        }
    }));
}

TEST_CASE("compressed bombs and loose zstd frames are refused") {
    std::vector<std::uint8_t> raw(kRawMax);
    const std::string zeros(raw.size(), '\0');
    const std::string good = pack(as_bytes(zeros), 1);
    CHECK(unpack(as_bytes(good), raw.data(), raw.size()).has_value());
    CHECK_FALSE(
        unpack(as_bytes(good), raw.data(), raw.size() - 1).has_value());  // states more than asked
    CHECK_FALSE(unpack(as_bytes(good + good), raw.data(), raw.size()).has_value());
    CHECK_FALSE(unpack(as_bytes(good + "x"), raw.data(), raw.size()).has_value());
    CHECK_FALSE(unpack(as_bytes(good).first(good.size() - 1), raw.data(), raw.size()).has_value());
    CHECK_FALSE(unpack({}, raw.data(), raw.size()).has_value());

    const auto with = [&](auto... settings) {
        ZSTD_CCtx* context = ZSTD_createCCtx();
        (ZSTD_CCtx_setParameter(context, settings.first, settings.second), ...);
        std::string packed(ZSTD_compressBound(zeros.size()), '\0');
        packed.resize(
            ZSTD_compress2(context, packed.data(), packed.size(), zeros.data(), zeros.size()));
        ZSTD_freeCCtx(context);
        return unpack(as_bytes(packed), raw.data(), raw.size()).has_value();
    };
    using Setting = std::pair<ZSTD_cParameter, int>;
    CHECK(with(Setting{ZSTD_c_checksumFlag, 1}));
    CHECK_FALSE(with(Setting{ZSTD_c_checksumFlag, 0}));
    CHECK_FALSE(with(Setting{ZSTD_c_checksumFlag, 1}, Setting{ZSTD_c_contentSizeFlag, 0}));
}

TEST_CASE("a seek table has one entry per frame and zstd's last words") {
    SeekTable table;
    table.add(10, 0);
    table.add(20, 300);
    CHECK(hex(as_bytes(table.frame())) ==
          "5e2a4d18"
          "19000000"
          "0a000000"
          "00000000"
          "14000000"
          "2c010000"
          "02000000"
          "00"
          "b1ea928f");
}
