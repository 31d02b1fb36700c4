#include "src/base/file.h"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

using namespace kvw;

namespace fs = std::filesystem;

namespace {

// An empty folder that is gone at the end of the test.
class Folder {
  public:
    Folder() {
        std::string name = (fs::temp_directory_path() / "kvw-file-test-XXXXXX").string();
        REQUIRE(::mkdtemp(name.data()) != nullptr);
        path_ = name;
    }
    ~Folder() { fs::remove_all(path_); }
    Path operator/(const char* name) const { return path_ / name; }

  private:
    Path path_;
};

unsigned mode_of(const Path& path) {
    struct stat facts {};
    REQUIRE(::stat(path.c_str(), &facts) == 0);
    return facts.st_mode & 0777u;
}

Path file_with(const Path& path, std::string_view text) {
    auto file = File::create(path);
    REQUIRE(file);
    REQUIRE(file->write_all(text));
    return path;
}

}  // namespace

TEST_CASE("a new file is readable by its owner only, whatever the umask") {
    const Folder folder;
    const mode_t before = ::umask(0);
    file_with(folder / "a", "text");
    CHECK(make_folders(folder / "x/y/z"));
    ::umask(before);
    CHECK(mode_of(folder / "a") == 0600);
    CHECK(mode_of(folder / "x") == 0700);
    CHECK(mode_of(folder / "x/y/z") == 0700);
    CHECK(make_folders(folder / "x/y/z"));
}

TEST_CASE("create() never overwrites unless told to") {
    const Folder folder;
    const Path path = file_with(folder / "a", "first");
    const auto again = File::create(path);
    REQUIRE_FALSE(again);
    CHECK(again.error().code == ErrorCode::file_exists);
    CHECK(read_file(path, 100) == "first");
    REQUIRE(File::create(path, true));
    CHECK(read_file(path, 100) == "");
}

TEST_CASE("create() does not follow a symbolic link") {
    const Folder folder;
    file_with(folder / "target", "precious");
    fs::create_symlink(folder / "target", folder / "link");
    CHECK_FALSE(File::create(folder / "link"));
    CHECK_FALSE(File::create(folder / "link", true));
    CHECK_FALSE(File::open_append(folder / "link"));
    CHECK(read_file(folder / "target", 100) == "precious");
}

TEST_CASE("what is not a regular file is neither emptied nor renamed over") {
    const Folder folder;
    fs::create_directory(folder / "folder");
    REQUIRE(::mkfifo((folder / "fifo").c_str(), 0600) == 0);
    file_with(folder / "target", "precious");
    fs::create_symlink(folder / "target", folder / "link");
    for (const char* name : {"folder", "fifo", "link"}) {
        CAPTURE(name);
        const Path path = folder / name;
        const auto kind = fs::symlink_status(path).type();
        const auto created = File::create(path, true);
        const Status renamed = rename_replace(file_with(folder / "new", "new"), path);
        REQUIRE_FALSE(created);
        REQUIRE_FALSE(renamed);
        CHECK(created.error().code == ErrorCode::file_exists);
        CHECK(renamed.error().code == ErrorCode::file_exists);
        CHECK(renamed.error().message.find("is not a regular file") != std::string::npos);
        CHECK(fs::symlink_status(path).type() == kind);
        fs::remove(folder / "new");
    }
    CHECK(read_file(folder / "target", 100) == "precious");
    CHECK(check_replaceable(folder / "target"));
    CHECK(check_replaceable(folder / "nothing"));
}

TEST_CASE("reading at an offset gives exactly the bytes asked for, or an error") {
    const Folder folder;
    const auto file = File::open_read(file_with(folder / "a", "0123456789"));
    REQUIRE(file);
    std::uint8_t four[4];
    REQUIRE(file->read_at(3, four));
    CHECK(std::string_view(reinterpret_cast<char*>(four), 4) == "3456");
    const Status past = file->read_at(8, four);
    REQUIRE_FALSE(past);
    CHECK(past.error().code == ErrorCode::io);
    CHECK(past.error().message.find("it ends at byte 10") != std::string::npos);
    CHECK(file->size() == 10);
}

TEST_CASE("appending goes to the end, and truncate cuts") {
    const Folder folder;
    {
        auto file = File::open_append(folder / "log");
        REQUIRE(file);
        CHECK(file->write_all("one "));
        CHECK(file->write_all("two"));
    }
    auto file = File::open_append(folder / "log");
    REQUIRE(file);
    CHECK(file->write_all(" three"));
    CHECK(read_file(folder / "log", 100) == "one two three");
    CHECK(file->truncate(3));
    CHECK(file->sync());
    CHECK(read_file(folder / "log", 100) == "one");
}

TEST_CASE("missing files and folders are errors that name the path") {
    const Folder folder;
    const auto missing = File::open_read(folder / "none");
    REQUIRE_FALSE(missing);
    CHECK(missing.error().code == ErrorCode::io);
    CHECK(missing.error().message.find("none: No such file") != std::string::npos);
    CHECK_FALSE(File::open_read(fs::temp_directory_path()));
    CHECK_FALSE(read_file(folder / "none", 10));
    CHECK_FALSE(MappedFile::map(folder / "none"));
}

TEST_CASE("read_file() has a limit") {
    const Folder folder;
    const Path path = file_with(folder / "a", std::string(100, 'x'));
    CHECK(read_file(path, 100)->size() == 100);
    const auto over = read_file(path, 99);
    REQUIRE_FALSE(over);
    CHECK(over.error().code == ErrorCode::bad_input);
}

TEST_CASE("a file's identity changes when it is replaced or rewritten") {
    const Folder folder;
    const Path path = file_with(folder / "a", "one");
    const auto identity = [&] { return *File::open_read(path)->identity(); };
    const FileIdentity first = identity();
    CHECK(first == identity());
    CHECK(first.size == 3);
    file_with(folder / "b", "two");
    REQUIRE(rename_replace(folder / "b", path));
    CHECK(identity() != first);
}

TEST_CASE("rename_new() refuses to replace, rename_replace() does not") {
    const Folder folder;
    file_with(folder / "a", "a");
    file_with(folder / "b", "b");
    const Status refused = rename_new(folder / "a", folder / "b");
    REQUIRE_FALSE(refused);
    CHECK(refused.error().code == ErrorCode::file_exists);
    CHECK(read_file(folder / "b", 10) == "b");
    CHECK(rename_new(folder / "a", folder / "c"));
    CHECK(read_file(folder / "c", 10) == "a");
    CHECK(rename_replace(folder / "c", folder / "b"));
    CHECK(read_file(folder / "b", 10) == "a");
}

TEST_CASE("a lock is held by one open file at a time, and let go with it") {
    const Folder folder;
    const Path path = file_with(folder / "a", "");
    auto first = File::open_append(path);
    auto second = File::open_append(path);
    REQUIRE(first);
    REQUIRE(second);
    CHECK(first->try_lock());
    CHECK_FALSE(second->try_lock());
    first->close();
    CHECK(second->try_lock());
}

TEST_CASE("a mapping shows the whole file, an empty one nothing, and moves with its owner") {
    const Folder folder;
    auto mapped = MappedFile::map(file_with(folder / "a", "mapped text"));
    REQUIRE(mapped);
    const MappedFile moved = std::move(*mapped);
    CHECK(moved.bytes().size() == 11);
    CHECK(moved.bytes()[0] == 'm');
    CHECK(moved.identity().size == 11);
    const auto empty = MappedFile::map(file_with(folder / "empty", ""));
    REQUIRE(empty);
    CHECK(empty->bytes().empty());
}

TEST_CASE("a full device is disk_full, and errors keep escape sequences out of messages") {
    auto full = File::open_append("/dev/full");
    if (full) {
        const Status put = full->write_all("x");
        REQUIRE_FALSE(put);
        CHECK(put.error().code == ErrorCode::disk_full);
    }
    CHECK(errno_error("cannot open", "a\x1b[2Jb", ENOENT).message ==
          "cannot open a\\x1b[2Jb: No such file or directory");
    CHECK(errno_error("x", "y", EDQUOT).code == ErrorCode::disk_full);
    CHECK(errno_error("x", "y", ENOMEM).code == ErrorCode::out_of_memory);
    CHECK(errno_error("x", "y", EACCES).code == ErrorCode::io);
}
