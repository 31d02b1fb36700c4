#include "cli/signals.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <string_view>

#include "src/base/check.h"

namespace kvw::cli {

namespace {

// Handlers run between any two instructions: what they use is here, fixed in size and lock-free.
std::atomic<int> stopped_by{0};
std::atomic<bool> finish_step{false};
std::atomic<bool> object_owed{false};
std::array<char, 128> schema_owed{};

void put(int descriptor, std::string_view text) {
    while (!text.empty()) {
        const ssize_t n = write(descriptor, text.data(), text.size());
        if (n <= 0) {
            return;
        }
        text.remove_prefix(static_cast<std::size_t>(n));
    }
}

// The object that is owed, if one is.
void put_last_object(const char* code, std::string_view message, int status) {
    if (object_owed.exchange(false)) {
        const std::array<char, 3> digits = {static_cast<char>('0' + status / 100),
                                            static_cast<char>('0' + status / 10 % 10),
                                            static_cast<char>('0' + status % 10)};
        std::string_view number(digits.data(), digits.size());
        number.remove_prefix(std::min(number.find_first_not_of('0'), number.size() - 1));
        for (const std::string_view part :
             {std::string_view("{\"schema\":\"kvwitness/"), std::string_view(schema_owed.data()),
              std::string_view("\",\"v\":1,\"error\":{\"code\":\""), std::string_view(code),
              std::string_view("\",\"message\":\""), message, std::string_view("\",\"exit\":"),
              number, std::string_view("}}\n")}) {
            put(STDOUT_FILENO, part);
        }
    }
}

[[noreturn]] void end_now(const char* code, const char* message, int status) {
    put_last_object(code, message, status);
    put(STDERR_FILENO, "kvwitness: ");
    put(STDERR_FILENO, message);
    put(STDERR_FILENO, "\n");
    _exit(status);
}

void on_stop(int signal_number) {
    const int error_number = errno;
    if (!finish_step.load() || stopped_by.load() != 0) {
        end_now("cancelled", "stopped by a signal", 128 + signal_number);
    }
    stopped_by.store(signal_number);
    errno = error_number;
}

// Our own words for what must hold: no quote or backslash is in them.
void on_failed_check(const char* what) { put_last_object("invariant", what, 7); }

void on_bus_error(int) {
    end_now("file_changed", "a file became shorter while it was being read", 5);
}

void handle(int signal_number, void (*handler)(int), int flags) {
    struct sigaction action {};
    action.sa_handler = handler;
    action.sa_flags = flags;
    sigemptyset(&action.sa_mask);
    sigaction(signal_number, &action, nullptr);
}

bool ignored(int signal_number) {
    struct sigaction action {};
    return sigaction(signal_number, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace

void guard_standard_files() {
    for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
        if (fcntl(descriptor, F_GETFD) == -1 && errno == EBADF) {
            // The lowest free number is this one, as those below are open by now.
            if (open("/dev/null", descriptor == STDERR_FILENO ? O_WRONLY : O_RDONLY) !=
                descriptor) {
                _exit(5);
            }
        }
    }
}

void install_signal_handlers() {
    handle(SIGPIPE, SIG_IGN, 0);
    handle(SIGXFSZ, SIG_IGN, 0);
    // No SA_RESTART: a read of the prompt ends when a signal comes.
    handle(SIGINT, on_stop, 0);
    handle(SIGTERM, on_stop, 0);
    if (!ignored(SIGHUP)) {  // nohup
        handle(SIGHUP, on_stop, 0);
    }
    set_check_last_words(on_failed_check);
    // An exception that nobody can catch, in a thread of the pool.
    std::set_terminate([] { end_now("invariant", "ended by an exception in a thread", 7); });
    static std::array<char, 16384> stack;
    stack_t alternate{};
    alternate.ss_sp = stack.data();
    alternate.ss_size = stack.size();
    sigaltstack(&alternate, nullptr);
    handle(SIGBUS, on_bus_error, SA_ONSTACK);
}

void finish_steps_on_signal(bool on) { finish_step.store(on); }
int stop_signal() { return stopped_by.load(); }
void forget_stop_signal() { stopped_by.store(0); }

void owe_object(const std::string& schema) {
    object_owed.store(false);
    if (!schema.empty()) {
        const std::size_t length = std::min(schema.size(), schema_owed.size() - 1);
        std::memcpy(schema_owed.data(), schema.data(), length);
        schema_owed[length] = '\0';
        object_owed.store(true);
    }
}

}  // namespace kvw::cli
