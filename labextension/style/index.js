import './base.css';
import './surfaces.css';
