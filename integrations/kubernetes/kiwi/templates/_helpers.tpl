{{- define "kiwi.name" -}}
{{- $name := ternary .Release.Name (printf "%s-kiwi" .Release.Name) (contains "kiwi" .Release.Name) -}}
{{- $name | trunc 52 | trimSuffix "-" -}}
{{- end }}

{{- define "kiwi.selector" -}}
app.kubernetes.io/name: kiwi
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kiwi.labels" -}}
{{ include "kiwi.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "kiwi.image" -}}
{{- $repository := required "image.repository is not set. No registry has Kiwi's image: build it (integrations/kubernetes/Dockerfile), push it to a registry of yours, and name it." .Values.image.repository -}}
{{ $repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ with .Values.image.digest }}@{{ . }}{{ end }}
{{- end }}

{{- /* The name of the ConfigMap with the files for NVIDIA's device plugin; empty: there is none. */ -}}
{{- define "kiwi.configMap" -}}
{{- with .Values.config -}}
{{- if and .name .map -}}
{{- fail "config.name and config.map are both set: give the name of a ConfigMap that exists, or the files." -}}
{{- end -}}
{{- .name | default (ternary (printf "%s-config" (include "kiwi.name" $)) "" (not (empty .map))) -}}
{{- end -}}
{{- end }}

{{- /* The file in it that is used; empty: none. */ -}}
{{- define "kiwi.configFile" -}}
{{- $config := .Values.config -}}
{{- $file := $config.default -}}
{{- if $config.name -}}
{{- $file = required "config.default is not set: which file of the ConfigMap config.name is to be used?" $file -}}
{{- else if and $file (not (hasKey $config.map $file)) -}}
{{- fail (printf "config.default is %q, and config.map has no such file." $file) -}}
{{- else if and $config.map (not $file) -}}
{{- range $config.fallbackStrategies -}}
{{- if $file -}}
{{- else if and (eq . "named") (hasKey $config.map "default") -}}{{- $file = "default" -}}
{{- else if and (eq . "single") (eq (len $config.map) 1) -}}{{- $file = keys $config.map | first -}}
{{- end -}}
{{- end -}}
{{- if and (not $file) (not (has "empty" $config.fallbackStrategies)) -}}
{{- fail "config.map has several files, none of which is named \"default\": say which one is used (config.default)." -}}
{{- end -}}
{{- end -}}
{{- if and $file $config.map -}}
{{- include "kiwi.refuse" (index $config.map $file | fromYaml) -}}
{{- end -}}
{{- $file -}}
{{- end }}

{{- /* The plugin itself refuses these, too; here it is said before anything is installed. */ -}}
{{- define "kiwi.refuse" -}}
{{- if .Error -}}
{{- fail (printf "The file of config is no YAML: %s" .Error) -}}
{{- end -}}
{{- if dig "sharing" "mps" "" . -}}
{{- fail "The file of config has sharing.mps. NVIDIA's driver cannot move the memory of a program under MPS: use sharing.timeSlicing, whose places Kiwi takes over." -}}
{{- end -}}
{{- if not (has (dig "flags" "migStrategy" "none" .) (list "none" nil)) -}}
{{- fail "The file of config has a flags.migStrategy. NVIDIA's driver cannot move memory out of MIG instances: Kiwi shares whole GPUs only." -}}
{{- end -}}
{{- end }}
