"""Faults that were found in a review, R1 to R19, each with the behaviour that the design wants instead.

| file | findings |
|---|---|
| `test_r01_takeover.py` | R1 several nodes take over, or answer, at once |
| `test_r02_waiting.py` | R2 a run that waits is not ended; R13 a child whose call has ended does not wait |
| `test_r03_two_nodes.py` | R3 the store is believed, not the memory; R11 cancelling a run that was left suspended |
| `test_r04_owners.py` | R4 an owner that woke late; R5 owners that look alike, clocks; R6 the heartbeat |
| `test_r07_interrupts.py` | R7 storms of interrupts |
| `test_r08_partly_answered.py` | R8 one child answered before a restart, one after |
| `test_r09_call_ids.py` | R9 ids that a model chooses |
| `test_r10_order.py` | R10 stored before started; messages in order |
| `test_r12_unclosed.py` | R12 programs that do not close |
| `test_r14_pruned.py` | R14 following a log that is pruned |
| `test_r15_limits.py` | R15 limits that equal the default |
| `test_r16_storage.py` | R16 deleted databases, disks that stall |
| `test_r17_memory.py` | R17 what stays in memory, and what is never pruned |
| `test_r18_close.py` | R18 closing |
| `test_r19_records.py` | R19 late children, stored outputs |

They use the public names and real processes only. `support` starts and stops processes, `programs` is what these run.
"""
