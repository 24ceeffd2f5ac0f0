"""The report of a search: one page that needs no network and no program but a browser.

`page` fills the template, `page_content` says what is on it, `hardware_changes` what other
hardware would do.

In:      a result.
Out:     one HTML page.
Imports: driver, space, basics, the simulator.
"""
