module example.com/gpu-agent/tests/monitoring

go 1.26.0

require (
	github.com/grafana/grafana-foundation-sdk/go v0.0.22 // indirect
	github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring v0.95.2 // indirect
)
