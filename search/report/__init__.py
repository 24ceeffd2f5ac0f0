"""What can be said of a search: one page that needs no network, and how sure its choice is.

`page` fills the template, `page_content` says what is on it, `hardware_changes` what other
hardware would do, `cluster_sizes` how much of it to take; `robustness` prices the plans compared
under errors of the prices.

In:      a result.
Out:     one HTML page, tables.
Imports: driver, robustness, space, basics, the simulator.
"""
