/* Faults and a count of calls: only a library that is built for tests has them (native/tests/library). */
#ifndef KP_TESTED_H
#define KP_TESTED_H

#ifdef KP_TESTED
#include "testing.h"
#else
#define kp_fault(kind) false
#define kp_count_passage() ((void)0)
#endif

#endif
