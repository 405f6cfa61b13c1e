// Whether a step may be run as it is laid out.
#pragma once
#include <vector>

#include "octavo.h"

namespace octavo {

enum Error {
    OK, BAD_COUNT, BAD_ID, BAD_POSITION, BAD_SEQUENCE, BAD_TABLE, BAD_SAMPLE, BAD_COPY, BAD_TAP, BAD_ADAPTER, NO_MEMORY,
};

// The program's operations say what ids there are, and which of them may be tapped. OK, or the first error that is found:
// see `oct_error`. Nothing is read or written outside of the step and the pool once it is OK.
int check(const OctStep&, const OctShape&, const std::vector<OctOp>& ops);

}  // namespace octavo
