// The programs that check the sources. They are a module of their own, so that what they
// need does not decide the versions that the product is built with.
module example.com/gpu-agent/tests/tools

go 1.26.0

tool honnef.co/go/tools/cmd/staticcheck

require (
	github.com/nishanths/exhaustive v0.12.0
	golang.org/x/tools v0.51.0
)

require (
	github.com/BurntSushi/toml v1.4.1-0.20240526193622-a339e1f7089c // indirect
	golang.org/x/exp/typeparams v0.0.0-20231108232855-2478ac86f678 // indirect
	golang.org/x/mod v0.41.0 // indirect
	golang.org/x/sync v0.23.0 // indirect
	honnef.co/go/tools v0.8.2 // indirect
)
