/* What only a library built for tests has (tests/preload/library): faults and a count of calls. */
#ifndef KP_TESTED_H
#define KP_TESTED_H

#ifdef KP_TESTED
#include "testing.h"
#else
#define kp_fault(kind) false
#define kp_count_passage() ((void)0)
#endif

#endif
