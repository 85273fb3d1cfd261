// SPDX-License-Identifier: Apache-2.0

// Package page looks at the agent's status page as people will: in a browser.
//
// Chromium's headless shell loads /statusz from the agent's own server, in the
// light, the dark and the system's own colours, in windows of 320 to 1280 pixels,
// with each of a few nodes: one with everything on it, one with all that can be
// wrong, a cube mesh, sixteen GPUs, none, one whose every word is hostile. For
// each of them the browser is asked
//
//   - whether it complains: of a request it refused, of a style it did not apply
//   - whether the page is wider than the window
//   - of every text, how it stands out from what is behind it, how large it is,
//     and whether it covers another one or is cut off
//   - what a screen reader would be told: headings, captions, names
//   - where the Tab key goes, and whether one sees it
//
// That it would find such things is tested on a page that has them all.
//
// The browser and three typefaces are Debian's packages, about 90 MB. They are
// unpacked below the cache at the first time, with the libraries that this
// machine lacks; nothing is installed. Where that cannot be done the tests fail.
//
//	go test ./tests/page            # what make test does
//	go test ./tests/page -update    # draws docs/status.png anew
//	go test ./tests/page -shots D   # leaves a picture of each page in D
//
// The picture for the README says of which page it is, so that a page that
// has changed without it is noticed.
//
// The package does not know what the page should say: internal/status tests that.
package page
