#include "src/jobs/line_reader.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace kvw {

namespace {

constexpr std::size_t kReadBytes = 64 << 10;

std::span<const std::uint8_t> as_bytes(std::string_view text) {
    return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

}  // namespace

Result<bool> LineReader::fill() {
    if (ended_) {
        return false;
    }
    buffer_.erase(0, start_);
    searched_ -= start_;
    start_ = 0;
    const std::size_t before = buffer_.size();
    buffer_.resize(before + kReadBytes);
    const ssize_t got = ::read(descriptor_, buffer_.data() + before, kReadBytes);
    const int error_number = errno;
    buffer_.resize(before + static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
    if (got < 0 && error_number != EINTR && error_number != EAGAIN) {
        return Error{ErrorCode::io,
                     std::string("cannot read the input: ") + std::strerror(error_number)};
    }
    all_.update(std::string_view(buffer_).substr(before));
    bytes_ += buffer_.size() - before;
    ended_ = got == 0;
    return !ended_;
}

RawLine LineReader::finish_line(std::string_view rest) {
    RawLine line{.number = ++number_, .length = long_length_ + rest.size()};
    line.too_long = line.length > bytes_max_;
    if (long_length_ > 0) {
        long_.update(rest);
        line.digest = long_.digest();
        long_ = Sha256();
        long_length_ = 0;
    } else {
        line.digest = sha256(as_bytes(rest));
    }
    if (!line.too_long) {
        line.bytes = rest;
    }
    return line;
}

std::optional<RawLine> LineReader::take() {
    const std::size_t feed = buffer_.find('\n', searched_);
    if (feed != std::string::npos) {
        std::string_view rest = std::string_view(buffer_).substr(start_, feed - start_);
        if (rest.ends_with('\r')) {
            rest.remove_suffix(1);
        }
        RawLine line = finish_line(rest);
        start_ = searched_ = feed + 1;
        return line;
    }
    searched_ = buffer_.size();
    if (ended_) {
        if (buffered() == 0 && long_length_ == 0) {
            return std::nullopt;
        }
        RawLine line = finish_line(std::string_view(buffer_).substr(start_));
        start_ = buffer_.size();
        return line;
    }
    if (buffered() > bytes_max_ + 1) {
        // All but the last byte, which may belong to the terminator.
        const std::string_view whole = std::string_view(buffer_).substr(start_, buffered() - 1);
        long_.update(whole);
        long_length_ += whole.size();
        start_ += whole.size();
    }
    return std::nullopt;
}

Result<std::optional<RawLine>> LineReader::next() {
    for (;;) {
        std::optional<RawLine> line = take();
        if (line || ended_) {
            return line;
        }
        if (const Result<bool> more = fill(); !more) {
            return more.error();
        }
    }
}

Result<InputFacts> scan_input(const Path& path) {
    Result<File> file = File::open_read(path);
    if (!file) {
        return file.error();
    }
    InputFacts facts;
    Sha256 hash;
    std::array<std::uint8_t, kReadBytes> buffer;
    bool open_line = false;
    for (;;) {
        const Result<std::size_t> got = file->read_some(buffer);
        if (!got) {
            return got.error();
        }
        if (*got == 0) {
            break;
        }
        const std::span<const std::uint8_t> part(buffer.data(), *got);
        hash.update(part);
        facts.bytes += part.size();
        facts.lines += static_cast<std::uint64_t>(std::count(part.begin(), part.end(), '\n'));
        open_line = part.back() != '\n';
    }
    facts.lines += open_line ? 1 : 0;
    facts.digest = hash.digest();
    return facts;
}

}  // namespace kvw
