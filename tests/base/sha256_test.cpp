#include "src/base/sha256.h"

#include <doctest/doctest.h>

using namespace kvw;

namespace {

std::span<const std::uint8_t> bytes_of(std::string_view text) {
    return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

}  // namespace

TEST_CASE("SHA-256 gives the digests of FIPS 180-4's examples") {
    CHECK(hex(sha256("")) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(hex(sha256("abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")) ==
          "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK(hex(sha256(std::string(1000000, 'a'))) ==
          "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_CASE("a running SHA-256 does not depend on how the bytes are cut") {
    const std::string text(1000, 'x');
    for (const std::size_t step : {1u, 7u, 63u, 64u, 65u, 999u}) {
        Sha256 running;
        for (std::size_t at = 0; at < text.size(); at += step) {
            running.update(std::string_view(text).substr(at, step));
        }
        CHECK(running.digest() == sha256(text));
    }
}

TEST_CASE("taking a digest leaves the state usable, and a copy goes on by itself") {
    Sha256 running;
    running.update("ab");
    CHECK(running.digest() == sha256("ab"));
    Sha256 copy = running;
    running.update("c");
    copy.update("d");
    CHECK(running.digest() == sha256("abc"));
    CHECK(copy.digest() == sha256("abd"));
    copy = running;
    CHECK(copy.digest() == sha256("abc"));
}

TEST_CASE("HMAC-SHA-256 gives the values of RFC 4231") {
    CHECK(hex(hmac_sha256(bytes_of(std::string(20, '\x0b')), bytes_of("Hi There"))) ==
          "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    CHECK(hex(hmac_sha256(bytes_of("Jefe"), bytes_of("what do ya want for nothing?"))) ==
          "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    CHECK(hex(hmac_sha256(bytes_of(std::string(131, '\xaa')),
                          bytes_of("Test Using Larger Than Block-Size Key - Hash Key First"))) ==
          "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST_CASE("hexadecimal text comes back as bytes, and anything else as nothing") {
    CHECK(hex(bytes_of(std::string_view("\x00\x7f\xff", 3))) == "007fff");
    CHECK(unhex("007fff") == std::string("\x00\x7f\xff", 3));
    CHECK(unhex("ABcd") == "\xab\xcd");
    CHECK(unhex("abc") == "");
    CHECK(unhex("zz") == "");
    CHECK(unhex("") == "");
}
