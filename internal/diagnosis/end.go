// SPDX-License-Identifier: Apache-2.0

package diagnosis

import (
	"cmp"
	"regexp"
	"strings"
)

// lacking are texts by which programs, the dynamic linkers of glibc and musl, the shell and the
// container's runtime say that the image lacks something. The first group is what it lacks.
var lacking = []*regexp.Regexp{
	regexp.MustCompile(`(lib[\w+.-]+\.so[\w.]*): cannot open shared object file`),
	regexp.MustCompile(`Error loading shared library (lib[\w+.-]+)`),
	regexp.MustCompile(`exec: "?([\w./-]+)"?: (?:executable file not found|stat [\w./-]+: no such file or directory)`),
	regexp.MustCompile(`(?:^|[\s:])((?:/\S+/)?(?:nvidia-smi|nvcc|python3?)): (?:command )?not found`),
	regexp.MustCompile(`exec:? ?"?((?:/\S+/)?(?:nvidia-smi|nvcc|python3?))"?: no such file or directory`),
}

// unfit are texts by which programs say that the CUDA of their image does not serve: each with what
// that means.
var unfit = []struct{ text, means string }{
	{"Torch not compiled with CUDA enabled", "the image has a PyTorch without CUDA"},
	{"Found no NVIDIA driver on your system", "the image does not find the driver's library that the agent brings"},
	{"CUDA driver version is insufficient for CUDA runtime version",
		"the image's CUDA is newer than the node's driver allows"},
}

// exhausted are texts by which programs say that an allocation failed.
var exhausted = []string{"CUDA out of memory", "CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation",
	"torch.OutOfMemoryError", "RESOURCE_EXHAUSTED: Out of memory"}

// crashed returns how a container ended.
func (f *Facts) crashed(p *Pod, c *Container) []Finding {
	e := c.Ended
	said := e.Message + "\n" + c.Log
	for _, u := range unfit {
		if strings.Contains(said, u.text) {
			return []Finding{find(NoCUDA, "%s (container %s): %s", u.means, c.Name, line(said, u.text))}
		}
	}
	if lack(said) != "" {
		return []Finding{lacks(c, said)}
	}
	for _, text := range exhausted {
		if strings.Contains(said, text) {
			return []Finding{find(OutOfMemory, "container %s asked for more GPU memory than its piece has: %s", c.Name,
				line(said, text))}
		}
	}
	if e.Reason == "OOMKilled" {
		return []Finding{find(OOMKilled, "container %s used more of the node's memory than its limit and was killed",
			c.Name)}
	}
	again := ""
	if c.Running {
		again = "; it runs again"
	}
	out := find(Crash, "container %s ended with exit code %d (%s)%s: %s", c.Name, e.Exit, cmp.Or(e.Reason, "no reason"),
		again, cmp.Or(strings.TrimSpace(e.Message), last(c.Log), "its log was not read"))
	out.Next = strings.ReplaceAll(out.Next, "POD", p.Name+" -n "+p.Namespace+" -c "+c.Name)
	return []Finding{out}
}

// lack returns what an image lacks by what was said; empty if nothing is known to be lacking.
func lack(said string) string {
	for _, r := range lacking {
		if m := r.FindStringSubmatch(said); m != nil {
			return m[1]
		}
	}
	return ""
}

// lacks returns that the image of a container lacks something.
func lacks(c *Container, said string) Finding {
	what := cmp.Or(lack(said), "what its command starts")
	return find(NoCUDA, "the image of container %s lacks %s: %s", c.Name, what, line(said, what))
}

// line returns the line of a text that has a word, or all of a text without line breaks.
func line(text, word string) string {
	for l := range strings.SplitSeq(text, "\n") {
		if strings.Contains(l, word) {
			return l
		}
	}
	return last(text)
}

// last returns the last line of a text that is not empty.
func last(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}
