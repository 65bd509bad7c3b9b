{{- define "moonserve.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "moonserve.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "moonserve.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{ include "moonserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "moonserve.tokenSecret" -}}
{{ .Values.token.existingSecret | default (printf "%s-token" (include "moonserve.name" .)) }}
{{- end }}

{{/* Whether the Conductor may read engines from Kubernetes. */}}
{{- define "moonserve.discovers" -}}
{{- if .Values.config.kubernetes }}yes{{ end }}
{{- end }}

{{/* Where fronts and workers find the Conductor. */}}
{{- define "moonserve.conductorUrl" -}}
{{ include "moonserve.scheme" . }}://{{ include "moonserve.name" . }}-conductor:8000
{{- end }}

{{- define "moonserve.scheme" -}}
{{ if .Values.tls.enabled }}https{{ else }}http{{ end }}
{{- end }}

{{- define "moonserve.tlsSecret" -}}
{{ .Values.tls.existingSecret | default (printf "%s-tls" (include "moonserve.name" .)) }}
{{- end }}

{{/* How a kubelet asks a gateway, for a path: it checks no certificate. */}}
{{- define "moonserve.httpProbe" -}}
{{- $root := index . 0 -}}
httpGet: {path: {{ index . 1 }}, port: http{{ if $root.Values.tls.enabled }}, scheme: HTTPS{{ end }}}
{{- end }}

{{/* The same of a member of the cluster. With TLS it asks its clients for a certificate, and a
kubelet has none. */}}
{{- define "moonserve.memberProbe" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.tls.enabled -}}
tcpSocket: {port: http}
{{- else -}}
httpGet: {path: {{ index . 1 }}, port: http}
{{- end }}
{{- end }}

{{/* The same of a picker: by gRPC, which kubelets speak in clear only. */}}
{{- define "moonserve.pickerProbe" -}}
{{- $root := index . 0 -}}
{{- $service := index . 1 -}}
{{- if $root.Values.tls.enabled }}
{{- include "moonserve.httpProbe" (list $root (eq $service "readiness" | ternary "/ready" "/health")) }}
{{- else -}}
grpc: {port: 9002, service: {{ $service }}}
{{- end }}
{{- end }}

{{- define "moonserve.podAnnotations" -}}
checksum/config: {{ toYaml .Values.config | sha256sum }}
{{- with .Values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "moonserve.podSpec" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
# A Service named moonserve would otherwise set MOONSERVE_PORT in every pod.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "moonserve.image" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* The token and the addresses of the pod, for its command. */}}
{{- define "moonserve.env" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- name: MOONSERVE_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "moonserve.tokenSecret" . }}, key: token}}
{{- if .Values.tls.enabled }}
{{- range $name, $file := dict "CERT" "tls.crt" "KEY" "tls.key" "CA" "ca.crt" }}
- name: MOONSERVE_TLS_{{ $name }}
  value: /etc/moonserve-tls/{{ $file }}
{{- end }}
{{- end }}
{{- end }}

{{- define "moonserve.envFrom" -}}
{{- with .Values.engineKeys.existingSecret }}
envFrom:
  - secretRef: {name: {{ . }}}
{{- end }}
{{- end }}

{{- define "moonserve.mounts" -}}
- {name: config, mountPath: /etc/moonserve, readOnly: true}
- {name: cache, mountPath: /var/cache/moonserve}
- {name: tmp, mountPath: /tmp}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /etc/moonserve-tls, readOnly: true}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "moonserve.volumes" -}}
- name: config
  configMap: {name: {{ include "moonserve.name" . }}}
- name: cache
  {{- if .Values.models.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .Values.models.existingClaim }}}
  {{- else }}
  emptyDir: {}
  {{- end }}
- name: tmp
  emptyDir: {}
{{- if .Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ include "moonserve.tlsSecret" . }}, defaultMode: 0440}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}
