// The lines of a job's input, one after the other: a file, or a pipe that is still being written.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "src/base/file.h"
#include "src/base/result.h"
#include "src/base/sha256.h"

namespace kvw {

inline constexpr std::size_t kLineBytesMax = 8 << 20;

struct RawLine {
    std::uint64_t number = 0;  // from 1
    std::string bytes;         // without "\n" or "\r\n"; empty when too_long
    Digest256 digest{};        // SHA-256 of the line without its terminator, however long
    std::uint64_t length = 0;  // bytes
    bool too_long = false;     // over the limit: read, and not kept
};

// Memory is bounded by the longest line that is kept. A last line without a terminator is a line;
// what ends in one has no empty line behind it.
class LineReader {
  public:
    explicit LineReader(int descriptor, std::size_t bytes_max = kLineBytesMax)
        : descriptor_(descriptor), bytes_max_(bytes_max) {}

    // One read(2), which waits when there is nothing yet; false at the end of the input. A signal
    // ends the wait with true. Fails: io.
    Result<bool> fill();
    // The next whole line of what was read, if there is one.
    std::optional<RawLine> take();
    // The next line; none at the end of the input.
    Result<std::optional<RawLine>> next();

    bool at_end() const { return ended_; }
    std::size_t buffered() const { return buffer_.size() - start_; }
    std::uint64_t bytes() const { return bytes_; }  // read so far
    Digest256 digest() const { return all_.digest(); }

  private:
    RawLine finish_line(std::string_view rest);

    int descriptor_;
    std::size_t bytes_max_;
    bool ended_ = false;
    std::string buffer_;
    std::size_t start_ = 0, searched_ = 0;  // of the line; up to where there is no line feed
    std::uint64_t number_ = 0, bytes_ = 0;
    Sha256 all_;
    Sha256 long_;  // of a line that is not kept any more
    std::uint64_t long_length_ = 0;
};

// What an input is, before a line of it is worked on.
struct InputFacts {
    Digest256 digest{};  // of all its bytes
    std::uint64_t lines = 0, bytes = 0;
};
// Reads the whole file once. Fails: io.
Result<InputFacts> scan_input(const Path& path);

}  // namespace kvw
