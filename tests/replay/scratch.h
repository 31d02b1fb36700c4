// A folder for a test's files that is gone afterwards.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <string>

#include "src/base/file.h"

namespace kvw::test {

class Scratch {
  public:
    Scratch()
        : path_(std::filesystem::temp_directory_path() /
                ("kvw-replay-" + std::to_string(getpid()) + "-" + std::to_string(count_++))) {
        std::filesystem::create_directories(path_);
    }
    ~Scratch() { std::filesystem::remove_all(path_); }
    Path operator/(const std::string& name) const { return path_ / name; }

  private:
    static inline int count_ = 0;
    Path path_;
};

}  // namespace kvw::test
