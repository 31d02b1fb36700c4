// Signals as a flag that loops look at between steps, and the last words of a process that must end
// now.
#pragma once

#include <string>

namespace kvw::cli {

// Opens /dev/null in place of a closed stdin, stdout or stderr, so that no file of ours gets its
// number: an answer must never be written into a trace. Such a stdout still refuses every write.
void guard_standard_files();

// SIGINT, SIGTERM, SIGHUP: see below. SIGPIPE and SIGXFSZ become errors of write(2). SIGBUS (a
// mapped file got shorter) ends the process with exit 5, on a stack of its own. A failed check()
// prints the object that is owed before it ends the process.
void install_signal_handlers();

// What a signal does: end the process at once (the start), or set the flag below so that the step
// in progress is finished and the trace closed; then a second signal ends the process at once.
void finish_steps_on_signal(bool on);
int stop_signal();          // 0, or the signal that asked to stop
void forget_stop_signal();  // a prompt line goes on after the answer was cut short

// With --json the last words are an object of this schema; empty: none is owed (any more).
void owe_object(const std::string& schema);

}  // namespace kvw::cli
