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
http://{{ include "moonserve.name" . }}-conductor:8000
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
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}
