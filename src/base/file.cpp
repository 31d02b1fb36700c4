#include "src/base/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "src/base/text.h"

#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE 1
#endif

namespace kvw {

Error errno_error(std::string_view what, const Path& path, int error_number) {
    ErrorCode code = ErrorCode::io;
    if (error_number == ENOSPC || error_number == EDQUOT || error_number == EFBIG) {
        code = ErrorCode::disk_full;
    } else if (error_number == EEXIST) {
        code = ErrorCode::file_exists;
    } else if (error_number == ENOMEM) {
        code = ErrorCode::out_of_memory;
    }
    return {code, std::string(what) + " " + printable(path.string()) + ": " +
                      std::strerror(error_number)};
}

namespace {

Result<int> open_descriptor(const Path& path, int flags, std::string_view what) {
    const int descriptor = ::open(path.c_str(), flags | O_CLOEXEC, 0600);
    if (descriptor < 0) {
        return errno_error(what, path, errno);
    }
    return descriptor;
}

FileIdentity identity_of(const struct stat& facts) {
    return {facts.st_dev, facts.st_ino, static_cast<std::uint64_t>(facts.st_size),
            facts.st_mtim.tv_sec * 1'000'000'000LL + facts.st_mtim.tv_nsec};
}

}  // namespace

Result<File> File::open_read(const Path& path) {
    const auto descriptor = open_descriptor(path, O_RDONLY, "cannot open");
    if (!descriptor) {
        return descriptor.error();
    }
    File file(*descriptor, path);
    struct stat facts {};
    if (::fstat(*descriptor, &facts) != 0) {
        return errno_error("cannot open", path, errno);
    }
    if (S_ISDIR(facts.st_mode)) {
        return errno_error("cannot open", path, EISDIR);
    }
    return file;
}

Status check_replaceable(const Path& path) {
    struct stat facts {};
    if (::lstat(path.c_str(), &facts) == 0 && !S_ISREG(facts.st_mode)) {
        return Error{ErrorCode::file_exists,
                     printable(path.string()) + " is not a regular file; choose another name"};
    }
    return {};
}

Result<File> File::create(const Path& path, bool replace) {
    if (const Status replaceable = replace ? check_replaceable(path) : Status{}; !replaceable) {
        return replaceable.error();
    }
    const int flags = O_RDWR | O_CREAT | O_NOFOLLOW | (replace ? O_TRUNC : O_EXCL);
    const auto descriptor = open_descriptor(path, flags, "cannot create");
    if (!descriptor) {
        return descriptor.error();
    }
    return File(*descriptor, path);
}

Result<File> File::open_append(const Path& path) {
    const auto descriptor =
        open_descriptor(path, O_RDWR | O_CREAT | O_APPEND | O_NOFOLLOW, "cannot open");
    if (!descriptor) {
        return descriptor.error();
    }
    return File(*descriptor, path);
}

File::File(File&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), path_(std::move(other.path_)) {}

File& File::operator=(File&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    std::swap(path_, other.path_);
    return *this;
}

File::~File() { close(); }

void File::close() {
    if (descriptor_ >= 0) {
        ::close(std::exchange(descriptor_, -1));
    }
}

Result<FileIdentity> File::identity() const {
    struct stat facts {};
    if (::fstat(descriptor_, &facts) != 0) {
        return errno_error("cannot stat", path_, errno);
    }
    return identity_of(facts);
}

Result<std::uint64_t> File::size() const {
    const auto facts = identity();
    if (!facts) {
        return facts.error();
    }
    return facts->size;
}

Status File::read_at(std::uint64_t offset, std::span<std::uint8_t> into) const {
    while (!into.empty()) {
        const ssize_t got =
            ::pread(descriptor_, into.data(), into.size(), static_cast<off_t>(offset));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return errno_error("cannot read", path_, errno);
        }
        if (got == 0) {
            return Error{ErrorCode::io, "cannot read " + printable(path_.string()) +
                                            ": it ends at byte " + std::to_string(offset)};
        }
        into = into.subspan(static_cast<std::size_t>(got));
        offset += static_cast<std::uint64_t>(got);
    }
    return {};
}

Result<std::size_t> File::read_some(std::span<std::uint8_t> into) {
    for (;;) {
        const ssize_t got = ::read(descriptor_, into.data(), into.size());
        if (got >= 0) {
            return static_cast<std::size_t>(got);
        }
        if (errno != EINTR) {
            return errno_error("cannot read", path_, errno);
        }
    }
}

Status File::write_all(std::span<const std::uint8_t> bytes) {
    while (!bytes.empty()) {
        const ssize_t put = ::write(descriptor_, bytes.data(), bytes.size());
        if (put < 0 && errno == EINTR) {
            continue;
        }
        if (put < 0) {
            return errno_error("cannot write", path_, errno);
        }
        bytes = bytes.subspan(static_cast<std::size_t>(put));
    }
    return {};
}

Status File::write_all(std::string_view text) {
    return write_all({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
}

Status File::truncate(std::uint64_t size) {
    if (::ftruncate(descriptor_, static_cast<off_t>(size)) != 0) {
        return errno_error("cannot truncate", path_, errno);
    }
    return {};
}

Status File::sync() {
    if (::fsync(descriptor_) != 0) {
        return errno_error("cannot sync", path_, errno);
    }
    return {};
}

bool File::try_lock() { return ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0; }

Result<MappedFile> MappedFile::map(const Path& path) {
    auto file = File::open_read(path);
    if (!file) {
        return file.error();
    }
    const auto identity = file->identity();
    if (!identity) {
        return identity.error();
    }
    MappedFile mapping;
    mapping.path_ = path;
    mapping.identity_ = *identity;
    mapping.size_ = identity->size;
    if (mapping.size_ > 0) {
        void* data = ::mmap(nullptr, mapping.size_, PROT_READ, MAP_PRIVATE, file->descriptor(), 0);
        if (data == MAP_FAILED) {
            return errno_error("cannot map", path, errno);
        }
        mapping.data_ = static_cast<const std::uint8_t*>(data);
    }
    return mapping;
}

MappedFile::MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(identity_, other.identity_);
    std::swap(path_, other.path_);
    return *this;
}

MappedFile::~MappedFile() {
    if (data_ != nullptr) {
        ::munmap(const_cast<std::uint8_t*>(data_), size_);
    }
}

Result<std::string> read_file(const Path& path, std::uint64_t bytes_max) {
    auto file = File::open_read(path);
    if (!file) {
        return file.error();
    }
    std::string text;
    std::uint8_t buffer[65536];
    for (;;) {
        const auto got = file->read_some(buffer);
        if (!got) {
            return got.error();
        }
        if (*got == 0) {
            return text;
        }
        text.append(reinterpret_cast<const char*>(buffer), *got);
        if (text.size() > bytes_max) {
            return Error{ErrorCode::bad_input, printable(path.string()) + " is over " +
                                                   std::to_string(bytes_max) +
                                                   " bytes, the most that is read here"};
        }
    }
}

Status sync_folder(const Path& folder) {
    const Path name = folder.empty() ? Path(".") : folder;
    const int descriptor = ::open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) {
        return errno_error("cannot open folder", name, errno);
    }
    const int result = ::fsync(descriptor);
    const int error_number = errno;
    ::close(descriptor);
    if (result != 0 && error_number != EINVAL) {
        return errno_error("cannot sync folder", name, error_number);
    }
    return {};
}

Status rename_new(const Path& from, const Path& to) {
    if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) != 0) {
        if (errno != EINVAL && errno != ENOSYS) {
            return errno_error("cannot rename to", to, errno);
        }
        // This file system has no atomic rename-without-replace; a hard link refuses just as well.
        if (::link(from.c_str(), to.c_str()) != 0) {
            return errno_error("cannot rename to", to, errno);
        }
        ::unlink(from.c_str());
    }
    return sync_folder(to.parent_path());
}

Status rename_replace(const Path& from, const Path& to) {
    if (const Status replaceable = check_replaceable(to); !replaceable) {
        return replaceable;
    }
    if (::rename(from.c_str(), to.c_str()) != 0) {
        return errno_error("cannot rename to", to, errno);
    }
    return sync_folder(to.parent_path());
}

Status make_folders(const Path& folder) {
    if (folder.empty()) {
        return {};
    }
    if (::mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST) {
        return {};
    }
    if (errno != ENOENT || folder.parent_path() == folder) {
        return errno_error("cannot make folder", folder, errno);
    }
    const Status parents = make_folders(folder.parent_path());
    if (!parents) {
        return parents.error();
    }
    if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
        return errno_error("cannot make folder", folder, errno);
    }
    return {};
}

}  // namespace kvw
