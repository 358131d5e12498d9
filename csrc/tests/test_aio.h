// The part of the tests that moves files.
#pragma once

#include <cstdint>

namespace test {

// Number of requests that were checked; throws Failure.
int64_t test_files();

}  // namespace test
