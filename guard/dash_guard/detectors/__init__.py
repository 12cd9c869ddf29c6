"""Judges of what `checks` sent: pure functions of messages and the time, one file each.

replicas    who differs from whom, since when and in what    rest       who has changed state that nobody may change
doors       whose copy or whose shard a collective changed   wires      which reduction has given different results
learned     which ranks are equal where nothing is declared
roll_call   who computes another rank's step differently     replay     who computes its own step differently
liveness    who hangs, has died or is stopped            slow       who works longer than its peers
foreign     whose program or machine is another one      data       who reads the same data
verdicts    what findings mean together
"""
