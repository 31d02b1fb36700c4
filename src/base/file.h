// Files by descriptor, with errors as values. New files are 0600, new folders 0700, from birth.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "src/base/result.h"

namespace kvw {

using Path = std::filesystem::path;

// What identifies the bytes behind a name: changes when the file is replaced or rewritten.
struct FileIdentity {
    std::uint64_t device = 0;
    std::uint64_t inode = 0;
    std::uint64_t size = 0;        // bytes
    std::int64_t modified_ns = 0;  // since the epoch
    friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};

// An open file; the destructor closes it. Every call names the path in its error.
// Fails with io, disk_full (ENOSPC, EDQUOT, EFBIG) or file_exists; messages are safe to print.
class File {
  public:
    static Result<File> open_read(const Path& path);
    // Creates a file that must not exist yet (O_EXCL, 0600); with `replace` an existing one is
    // emptied, if check_replaceable() lets it.
    static Result<File> create(const Path& path, bool replace = false);
    // Opens for appending, creating when absent.
    static Result<File> open_append(const Path& path);

    File() = default;
    File(File&& other) noexcept;
    File& operator=(File&& other) noexcept;
    ~File();

    explicit operator bool() const { return descriptor_ >= 0; }
    int descriptor() const { return descriptor_; }
    const Path& path() const { return path_; }

    Result<FileIdentity> identity() const;
    Result<std::uint64_t> size() const;
    // Reads exactly `into.size()` bytes at `offset`. Fails: io, when the file is shorter.
    Status read_at(std::uint64_t offset, std::span<std::uint8_t> into) const;
    // Reads up to `into.size()` bytes from the current position; 0 at the end.
    Result<std::size_t> read_some(std::span<std::uint8_t> into);
    // Writes all bytes with as few write(2) calls as the kernel allows (one, normally).
    Status write_all(std::span<const std::uint8_t> bytes);
    Status write_all(std::string_view text);
    Status truncate(std::uint64_t size);
    Status sync();
    // An exclusive advisory lock for as long as the file is open; false when someone else holds it.
    bool try_lock();
    void close();

  private:
    File(int descriptor, Path path) : descriptor_(descriptor), path_(std::move(path)) {}
    int descriptor_ = -1;
    Path path_;
};

// A read-only mapping of a whole file. Reads past a truncation raise SIGBUS; cli installs a
// handler.
class MappedFile {
  public:
    static Result<MappedFile> map(const Path& path);
    MappedFile() = default;
    MappedFile(MappedFile&& other) noexcept;
    MappedFile& operator=(MappedFile&& other) noexcept;
    ~MappedFile();

    std::span<const std::uint8_t> bytes() const { return {data_, size_}; }
    const FileIdentity& identity() const { return identity_; }
    const Path& path() const { return path_; }

  private:
    const std::uint8_t* data_ = nullptr;
    std::size_t size_ = 0;
    FileIdentity identity_;
    Path path_;
};

// The whole file as bytes. Fails: io, or bad_input when it is larger than `bytes_max`.
Result<std::string> read_file(const Path& path, std::uint64_t bytes_max);
// Renames without replacing an existing `to`, then syncs the folder. Fails: file_exists, io.
Status rename_new(const Path& from, const Path& to);
// Fails: file_exists, when `path` is there and not a regular file. A device, FIFO, folder or link
// (whatever it leads to) is never emptied, renamed over or removed in favour of a file of ours.
Status check_replaceable(const Path& path);
// Renames over an existing `to`, if check_replaceable() lets it, then syncs the folder.
Status rename_replace(const Path& from, const Path& to);
Status sync_folder(const Path& folder);
// Makes the folder and its missing parents, each 0700.
Status make_folders(const Path& folder);
// The Error for the current errno: "<what> <path>: <reason>".
Error errno_error(std::string_view what, const Path& path, int error_number);

}  // namespace kvw
